from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import pytest

from flashtrain.errors import UserError
from flashtrain.report.rows import (
    collect_summaries,
    has_failed,
    read_result,
    status_text,
    write_result,
)

ROWS = [{"context": 1024, "train_loss": 3.5, "mfu": None}]


def job(folder: Path, **row: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(row), encoding="utf-8")
    return folder


def test_what_is_written_is_read_back(tmp_path: Path):
    written = write_result(
        tmp_path / "new" / "r.json", "gpt2", "the command", ROWS, "a GPU", {"torch": "2.13.0"}
    )
    assert read_result(tmp_path / "new" / "r.json") == written
    assert written.rows == ROWS
    write_result(tmp_path / "r.json", "gpt2", "c", [{"a": math.nan, "b": math.inf, "c": 1.5}])
    assert read_result(tmp_path / "r.json").rows == [{"a": None, "b": None, "c": 1.5}]


def test_date_device_and_versions_are_filled_in(tmp_path: Path):
    written = write_result(tmp_path / "r.json", "gpt2", "the command", [{"a": 1}])
    assert written.date == datetime.date.today().isoformat()
    assert written.device
    assert {"python", "torch", "pytorch-lightning", "flashtrain"} <= set(written.versions)


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"recipe": ', "line 1"), ('{"recipe": "gpt2", "rows": [{}]}', "'command'"), ("[]", "list")],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: str, said: str):
    (tmp_path / "some.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=rf"some\.json is not a result file.*{said}"):
        read_result(tmp_path / "some.json")


def test_rows_come_in_the_order_of_the_job_numbers(tmp_path: Path):
    for number in (10, 2, 0):
        job(tmp_path / str(number), context=number)
    job(tmp_path / "study" / "monday", context=3)
    found = [(row["run"], row["context"]) for row in collect_summaries(tmp_path)]
    assert found == [("0", 0), ("2", 2), ("10", 10), ("study/monday", 3)]


def test_a_job_without_a_summary_is_a_row_that_reports_it(tmp_path: Path):
    job(tmp_path / "0", context=1024)
    (tmp_path / "1").mkdir()
    early = collect_summaries(tmp_path)[1]
    assert (early["run"], early["status"]) == ("1", "no summary")
    assert has_failed(early)


def test_folders_that_are_no_jobs_are_no_rows(tmp_path: Path):
    job(tmp_path / "0", context=1024)
    for name in (".hydra", "wandb", "checkpoints"):
        (tmp_path / name).mkdir()
    assert len(collect_summaries(tmp_path)) == 1


def test_a_folder_without_runs_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"no run with a summary\.json"):
        collect_summaries(tmp_path)


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"context": 8}, "ok"),
        ({"status": "ok", "error": None}, "ok"),
        ({"status": "failed", "error": "ValueError: no"}, "failed"),
        ({"status": "failed", "error": "OutOfMemoryError: tried to allocate"}, "out of memory"),
        ({"error": "CUDA out of memory."}, "out of memory"),
        ({"status": "interrupted"}, "interrupted"),
    ],
)
def test_a_status_in_a_word_or_three(row: dict, status: str):
    assert status_text(row) == status
    assert has_failed(row) == (status != "ok")


def test_a_column_of_an_older_row_has_its_present_name(tmp_path: Path):
    older = {"context_parallel": 2, "context_way": "ring"}
    write_result(tmp_path / "r.json", "gpt2", "the command", [older])
    (run,) = collect_summaries(job(tmp_path / "run", **older))
    for row in (*read_result(tmp_path / "r.json").rows, run):
        assert row["context_method"] == "ring"
        assert "context_way" not in row
