"""Rows that anybody may have written: shown, never obeyed; and what cannot be shown is one line."""

from __future__ import annotations

import csv
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from flashtrain.errors import UserError
from flashtrain.files.disk import csv_value
from flashtrain.report.__main__ import main
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import ResultFile, collect_summaries, read_result, write_result
from flashtrain.report.save import save_result, source_line
from flashtrain.report.sweep import report_sweep
from flashtrain.report.table import View, make_table

# What a foreign summary.json may hold, each value of a kind of its own.
ODD: list[Any] = [
    "\x1b[2J\x1b[31mred", "\u202egnp.exe", "\ud800", "a|b", "`code`", "line\nline", "<script>alert(1)</script>",
    "![x](http://x/y.png)", "=HYPERLINK(1)", "@SUM(1)", "$\\frac{1$", "x" * 10**5, "", None, True,
    float("nan"), float("inf"), -0.0, 10**400, -(10**400), 1e308, [1, [2, {"a": 3}]], {"a": {"b": []}},
]  # fmt: skip


def sweep_of(folder: Path, values: list[Any], key: str) -> Path:
    """A sweep's folder, a run for each value under a key."""
    for number, value in enumerate(values):
        run = folder / f"{number:02d}"
        run.mkdir(parents=True)
        row = {"recipe": "gpt2", "device": "CPU", "status": "finished", "context": 512, "validation_loss": 3.0}
        row |= {"overrides": f"context=512 seed={number}", "versions": {"torch": "2"}, key: value}
        (run / "summary.json").write_text(json.dumps(row))
    return folder


def test_text_of_a_file_is_one_line_of_a_terminal_and_obeyed_by_none() -> None:
    table = make_table([{"recipe": "\x1b[2J\nred \u202e", "bad\x1b[0m": 1}])
    assert table.cells == [["\\x1b[2J red \\u202e", "1"]]
    assert table.headings == ["recipe", "bad\\x1b[0m"]


def test_markdown_shows_the_signs_of_markdown_and_html() -> None:
    (line,) = make_table([{"recipe": "a|b `c` <img src=x> [d](e) \\\n\n# f"}]).markdown().splitlines()[2:]
    assert line == "| a\\|b \\`c\\` &lt;img src=x> \\[d\\](e) \\\\ # f |"


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-cmd", "@SUM(1)", "\t=1", "\r=1", " =1", '=HYPERLINK("http://x")'])
def test_a_spreadsheet_computes_no_text(text: str) -> None:
    rows = list(csv.reader(io.StringIO(make_table([{"recipe": text, text: 1}]).csv(), newline="")))
    assert all(cell.startswith("'") for cell in (rows[0][1], rows[1][0]))
    assert csv_value(csv_value(text)) == csv_value(text)


@pytest.mark.parametrize("number", [-1.5, 3, "-1.5", "+3", "1e-9", "nan", None, True])
def test_a_spreadsheet_gets_numbers_as_they_are(number: Any) -> None:
    assert csv_value(number) == number or number is None


@pytest.mark.parametrize("key", ["context", "recipe", "model", "validation_loss", "tokens_per_second", "error", "x"])
def test_a_sweep_of_odd_values_has_its_table_and_figure(tmp_path: Path, key: str) -> None:
    folder = sweep_of(tmp_path, ODD, key)
    written = report_sweep(folder)
    text = written["markdown"].read_text() + written["csv"].read_text()
    assert "\x1b" not in text
    assert "<script" not in written["markdown"].read_text()
    assert len(list(csv.reader(written["csv"].open(newline="")))) == len(ODD) + 1


@pytest.mark.parametrize("key", ["status", "overrides", "versions", "device", "date", "command", "run"])
@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_a_run_with_an_odd_value_is_reported_and_saved_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder = sweep_of(tmp_path / "sweep", [value], key)
    assert len(collect_summaries(folder)) == 1
    make_table(collect_summaries(folder))
    with suppress(UserError):
        save_result(tmp_path / "saved.json", folder)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", "{", "[" * 10**5, '{"a": ' + "9" * 5000 + "}", "\x00", '{"a": "' + "x" * 2**20 + '"}'],
    ids=["empty", "list", "number", "half", "deep", "digits", "NUL", "large"],
)
def test_a_summary_that_is_none_is_a_row_that_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "summary.json").write_text(content)
    (tmp_path / "00" / "config.yaml").write_text("recipe: ${oc.env:HOME}\nmodel: [1]\ncontext: 512\n")
    (row,) = collect_summaries(tmp_path)
    assert (row["status"], row["context"], row["recipe"]) == ("no summary", 512, "${oc.env:HOME}")
    assert "summary.json" in row["error"]
    report_sweep(tmp_path)


def test_a_config_of_aliases_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "00" / "config.yaml").write_text("a: &a [1, 2]\nrecipe: gpt2\nb: *a\n")
    assert "recipe" not in collect_summaries(tmp_path)[0]


def test_a_folder_that_leads_back_to_itself_is_passed_over(tmp_path: Path) -> None:
    sweep_of(tmp_path, [1], "x")
    (tmp_path / "again").symlink_to(tmp_path)
    assert len(collect_summaries(tmp_path)) == 1


RESULT = {"recipe": "r", "command": "c", "date": "2026-01-31", "device": "d", "versions": {}, "rows": [{"a": 1}]}


@pytest.mark.parametrize("value", [[1], {"a": 1}, 10**400])
def test_a_result_files_rows_are_flat_and_of_numbers_that_can_be_computed_with(tmp_path: Path, value: Any) -> None:
    (tmp_path / "r.json").write_text(json.dumps({**RESULT, "rows": [{"a": value}]}))
    with pytest.raises(UserError, match=r"r\.json: row 1"):
        read_result(tmp_path / "r.json")


def test_a_result_file_from_elsewhere_may_say_nan(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({**RESULT, "rows": [{"a": float("nan"), "b": float("inf"), "c": 1}]}))
    assert read_result(tmp_path / "r.json").rows == [{"a": None, "b": None, "c": 1}]


@pytest.mark.parametrize("content", ["[" * 10**5, "\xff" * 3, "9" * 5000], ids=["deep", "no UTF-8", "digits"])
def test_a_result_file_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"r\.json") as caught:
        read_result(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


def test_the_line_below_a_table_is_one_line_of_code_and_words() -> None:
    result = ResultFile("r", "``a`` b\n# c\x1b[2J", "2026-01-31", "<b>\ngpu|", {"to`rch": "2"}, [{"a": 1}])
    line = source_line(result)
    assert line == "Measured 2026-01-31 on &lt;b> gpu\\| (to\\`rch 2): ``` ``a`` b # c\\x1b[2J ```"


@pytest.mark.parametrize("text", ["$\\frac{1$", "$$", "a $ b", "\\$", "_hidden", "\x1b[2J", "$x$ $\\badmacro$"])
def test_a_figures_labels_are_text_and_no_formulas(tmp_path: Path, text: str) -> None:
    rows = [{"name": text, "x": x, "kind": kind, "loss": 1.0} for x, kind in (("a", text), (text, "b"))]
    drawn = line_figure(
        [{**row, text: 1} for row in rows], "x", ["loss", text], ["kind"], tmp_path / "f.png", title=text
    )
    assert drawn.stat().st_size > 0


def test_a_figure_leaves_out_what_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"context": x, "loss": y, "loss_low": y, "loss_high": y} for x, y in ((1.0, 2.0), (float("inf"), 1.0))]
    rows += [{"context": float("nan"), "loss": 1.0}, {"context": 4.0, "loss": float("nan"), "loss_low": float("inf")}]
    seen: list[Figure] = []
    monkeypatch.setattr("flashtrain.report.figures.save", lambda figure, path: seen.append(figure))
    line_figure(rows, "context", "loss", None, tmp_path / "f.png")
    (panel,) = seen[0].axes
    assert panel.lines[0].get_xydata().tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("figure", ["accuracy", "curriculum", "attention-dots", "attention-runtime", "long-documents"])
def test_a_figure_of_rows_that_do_not_suit_it_is_one_line(tmp_path: Path, figure: str, capsys) -> None:
    row = {"task": "pathx", "side": "x", "contour": 3, "validation_accuracy": "high", "minutes": [], "accuracy": "most"}
    row |= {"tflops": "many", "direction": "forward", "implementation": "$a$", "seqlen_q": "long", "micro_f1": "b"}
    row["minutes"] = "long"
    write_result(tmp_path / "r.json", "r", "c", [row, row])
    status = main([str(tmp_path / "r.json"), "--figure", figure, "--out", str(tmp_path)])
    said = capsys.readouterr().err.splitlines()
    assert status == 2
    assert said[-1].startswith("error: ")


def test_a_pivot_over_lists_tells_them_in_words() -> None:
    rows = [{"overrides": ["a=1"], "p": "x", "v": 10**400}, {"overrides": ["a=1"], "p": "x", "v": 2.0}]
    table = View(["overrides"], "p", "v").table(rows)
    assert table.cells == [["a=1", "2"]]
