from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from flashtrain.report.sweep import (
    override_values,
    ranked,
    report_sweep,
    sweep_table,
    varied_keys,
    with_overrides,
)


def job(number: int, **changes: object) -> dict:
    return {
        "run": str(number),
        "recipe": "gpt2",
        "model": "gpt2-124m",
        "attention": "flash",
        "context": 1024,
        "batch": 64,
        "steps": 500,
        "train_loss": 3.4,
        "validation_loss": 3.5,
        "tokens_per_second": 470000.0,
        "mfu": 0.41,
        "peak_memory_gib": 30.0,
        "seconds": 70.0,
        "held_out_samples": 512,
        "device": "NVIDIA H200",
        "overrides": "",
        **changes,
    }


def sweep_folder(folder: Path, jobs: list[dict]) -> Path:
    for row in jobs:
        (folder / str(row["run"])).mkdir(parents=True)
        (folder / str(row["run"]) / "summary.json").write_text(json.dumps(row), encoding="utf-8")
    return folder


CONTEXTS = [
    job(i, context=1024 << i, batch=64 >> i, overrides=f"context={1024 << i}") for i in range(3)
]
OUT_OF_MEMORY = {
    "recipe": "gpt2",
    "run": "3",
    "status": "out of memory",
    "error": "CUDA out of memory",
    "overrides": "recipe=gpt2 context=8192",
}


def test_a_sweep_ends_with_a_table_in_three_forms_and_a_figure(tmp_path: Path, capsys):
    report_sweep(sweep_folder(tmp_path, [*CONTEXTS, OUT_OF_MEMORY]))
    assert all((tmp_path / f"sweep.{kind}").stat().st_size > 0 for kind in ("md", "png"))
    assert "8,192" in capsys.readouterr().out
    assert (
        "| 3 | - | - | - | 8,192 | - | - | - | - | out of memory |"
        in (tmp_path / "sweep.md").read_text()
    )


def test_reporting_again_does_not_count_the_report_as_a_job(tmp_path: Path):
    sweep_folder(tmp_path, CONTEXTS)
    report_sweep(tmp_path)
    first = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    report_sweep(tmp_path)
    assert (tmp_path / "sweep.md").read_text(encoding="utf-8") == first


def test_columns_are_the_run_its_scores_what_varies_and_measures_and_the_title_has_the_rest():
    table = sweep_table([{**row, "mfu": None} for row in CONTEXTS])
    assert table.columns[:4] == ("run", "validation_loss", "train_loss", "tokens_per_second")
    assert table.columns[4:] == ("context", "batch", "peak_memory_gib", "seconds")
    assert table.title == (
        "recipe gpt2, model gpt2-124m, attention flash, steps 500, held-out samples 512, "
        "device NVIDIA H200, the best validation loss first"
    )
    differing = sweep_table(
        [job(i, context=1024 << i, held_out_samples=512 >> i) for i in range(2)]
    )
    assert differing.columns[-1] == "held_out_samples"


def test_a_table_is_120_characters_wide_and_its_title_names_what_has_no_room():
    wide = ("data.path", "trainer.callbacks", "data.tokenizer")
    rows = with_overrides(
        [
            job(
                number,
                run=f"2026-11-29_06-49-1{number}",
                context=1024 << number,
                overrides=" ".join(f"{name}={'x' * 40}{number}" for name in wide),
            )
            for number in range(3)
        ]
    )
    table = sweep_table([*rows, OUT_OF_MEMORY])
    assert table.columns[0] == "run"
    assert {"context", "data.path"} <= {*table.columns}
    for name in wide[1:]:
        assert name not in table.columns
        assert name in table.title.partition("left out")[2]
    printed = Console(file=io.StringIO(), width=500)
    table.print(printed)
    _, *lines = printed.file.getvalue().rstrip().splitlines()[:-1]
    assert max(map(len, lines)) <= table.width <= 120


def test_the_best_job_comes_first_as_the_title_says_and_failed_ones_come_last():
    losses = {0: 3.5, 1: float("nan"), 2: 3.1}
    rows = [
        OUT_OF_MEMORY,
        *[job(i, context=1024 << i, validation_loss=loss) for i, loss in losses.items()],
    ]
    table = sweep_table(with_overrides(rows))
    assert [row["run"] for row in table.rows] == ["2", "0", "3", "1"]
    assert "the best validation loss first" in table.title
    scores = {"0": 0.7, "1": 0.9}
    table = sweep_table(
        [job(int(i), context=1024 << int(i), accuracy=score) for i, score in scores.items()]
    )
    assert [row["run"] for row in table.rows] == ["1", "0"]


def test_an_override_with_several_values_is_a_column():
    rows = [
        job(i, overrides=f"context=1024 optimizer.learning_rate={rate}")
        for i, rate in enumerate((1e-3, 3e-4))
    ]
    assert varied_keys(with_overrides(rows)) == ["optimizer.learning_rate"]
    assert "0.0003" in sweep_table(with_overrides(rows)).cells[1]


def test_losses_of_different_tokenizers_are_not_compared_without_a_word():
    names = ("bytes", "bpe")
    rows = [job(number, overrides=f"data.tokenizer={name}") for number, name in enumerate(names)]
    said = "losses of different tokenizers do not compare"
    assert said in sweep_table(with_overrides(rows)).title
    assert said not in sweep_table(with_overrides([rows[0], rows[0]])).title


def test_overrides_are_keys_with_typed_values_but_for_where_a_job_writes_and_is_logged():
    words = (
        "+a.b=1 c=x rate=1e-3 demo=true logger.group=g resume=auto hydra.run.dir=runs/0 output=o"
    )
    assert override_values({"overrides": words}) == {
        "a.b": 1,
        "c": "x",
        "rate": 0.001,
        "demo": True,
    }


def test_a_sweep_of_another_number_is_drawn_against_it(tmp_path: Path):
    rows = [
        job(i, overrides=f"optimizer.learning_rate={rate}") for i, rate in enumerate((1e-3, 3e-4))
    ]
    report_sweep(sweep_folder(tmp_path, rows))
    assert (tmp_path / "sweep.png").is_file()


def test_a_sweep_in_which_nothing_ran_is_a_table_without_a_figure(tmp_path: Path, capsys):
    (tmp_path / "0").mkdir()
    report_sweep(tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("sweep.*"))] == ["sweep.md"]
    assert "no summary" in capsys.readouterr().out


def test_a_job_that_failed_comes_last_whatever_its_score(tmp_path: Path):
    failed = job(
        3,
        status="failed",
        error="loss is not finite",
        validation_loss=0.1,
        overrides="context=8192",
    )
    rows = ranked([failed, job(1), job(2, validation_loss=3.4)], "validation_loss")
    assert [row["run"] for row in rows] == ["2", "1", "3"]
