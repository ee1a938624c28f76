"""python -m flashtrain.report"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashtrain.report.__main__ import main
from flashtrain.report.rows import read_result, write_result


@pytest.fixture
def result(tmp_path: Path) -> Path:
    rows = [
        {"model": "gpt2-124m", "context": 1024 << i, "tokens_per_second": 4e5, "train_loss": 3.4}
        for i in range(3)
    ]
    write_result(
        tmp_path / "gpt2.json",
        "gpt2",
        "python -m flashtrain recipe=gpt2",
        rows,
        "a GPU",
        {"torch": "2.13.0"},
    )
    return tmp_path / "gpt2.json"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for i in range(2):
        row = {
            "recipe": "gpt2",
            "context": 8 << i,
            "train_loss": 3.0,
            "device": "a GPU",
            "versions": "torch 2.13.0",
        }
        (tmp_path / "sweep" / str(i)).mkdir(parents=True)
        (tmp_path / "sweep" / str(i) / "summary.json").write_text(json.dumps(row), encoding="utf-8")
    return tmp_path / "sweep"


def test_a_result_file_prints_its_table_and_how_it_was_measured(
    result: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(result)]) == 0
    shown = capsys.readouterr().out
    assert "400,000" in shown
    assert "on a GPU (torch 2.13.0): `python -m flashtrain recipe=gpt2`" in shown


def test_markdown_of_the_columns_asked_for(result: Path, capsys: pytest.CaptureFixture[str]):
    main([str(result), "--markdown", "--columns", "context,train_loss"])
    assert capsys.readouterr().out.startswith(
        "| context | training loss |\n| ---: | ---: |\n| 1,024 | 3.400 |\n"
    )


def test_a_figure_has_the_sources_name(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main([str(result), "--figure", "context"]) == 0
    assert (tmp_path / "gpt2.png").is_file()


def test_a_folder_shows_runs_with_scores_and_then_what_varies(
    sweep: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(sweep), "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| run | training loss | context |",
        "| :--- | ---: | ---: |",
        "| 0 | 3.000 | 8 |",
        "| 1 | 3.000 | 16 |",
    ]


def test_runs_that_failed_before_a_step_are_counted_and_are_no_rows(
    sweep: Path, capsys: pytest.CaptureFixture[str]
):
    for name, status in {"2": "failed", "3": "failed", "4": "out of memory"}.items():
        (sweep / name).mkdir()
        row = {"recipe": "gpt2", "context": 8, "status": status, "error": "no such file"}
        (sweep / name / "summary.json").write_text(json.dumps(row))
    (sweep / "3" / "metrics.jsonl").write_text('{"train_loss": 3.0, "step": 0}\n')
    main([str(sweep), "--markdown"])
    shown = capsys.readouterr()
    runs = [line.split("|")[1].strip() for line in shown.out.splitlines() if line[:1] == "|"]
    assert runs == ["run", ":---", "0", "1", "3", "4"]
    assert "left out: 1 that failed before a step" in shown.err
    main([str(sweep), "--markdown", "--columns", "run,status"])  # all, if columns are given
    assert "| 2 | failed |" in capsys.readouterr().out
    main([str(sweep / "2"), "--markdown"])  # and one that is asked for by name
    assert "no such file" in capsys.readouterr().out


def test_several_sources_make_one_table(
    result: Path, sweep: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(result), str(sweep), "--markdown", "--columns", "context"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.strip("| ") for line in lines] == ["1,024", "2,048", "4,096", "8", "16"]


def test_save_turns_a_folder_into_a_result_file(sweep: Path, tmp_path: Path):
    assert main(["--save", str(tmp_path / "new.json"), str(sweep)]) == 0
    assert read_result(tmp_path / "new.json").recipe == "gpt2"


def test_insert_and_check_a_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("flashtrain.report.__main__.recipes_folder", lambda: tmp_path)
    write_result(tmp_path / "results" / "gpt2.json", "gpt2", "the command", [{"context": 8}])
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: gpt2 -->\n<!-- end table -->\n", encoding="utf-8")
    assert [main([option, str(readme)]) for option in ("--check", "--insert", "--check")] == [
        2,
        0,
        0,
    ]
    assert "disagrees with the result files of: gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--columns", "contxt"], "unknown column 'contxt'. Did you mean 'context'?"),
        (["--figure", "contxt"], "unknown figure 'contxt'. Did you mean 'context'?"),
        (["/no/such/file.json"], "No such file or directory: '/no/such/file.json'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    result: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main([str(result), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert main([]) == 2
    assert "Give a result file" in capsys.readouterr().err
