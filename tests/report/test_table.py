from __future__ import annotations

import io

import pytest
from rich.console import Console

from flashtrain.report.table import Table, make_table

ROWS = [
    {
        "context": 1024,
        "tokens_per_second": 412345.0,
        "model": "gpt2-124m",
        "mfu": None,
        "device": "H200",
    },
    {
        "context": 2048,
        "tokens_per_second": None,
        "model": "gpt2-124m",
        "mfu": None,
        "device": "H200",
    },
]
FAILED = {
    "context": 4096,
    "status": "failed",
    "error": "RuntimeError: a | b <c>\nsecond line",
    "device": "H200",
}


def printed(table: Table, terminal: bool = False, width: int = 40) -> str:
    out = io.StringIO()
    table.print(Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue()


def test_columns_are_those_with_values_in_the_known_order_or_those_that_are_named():
    assert make_table(ROWS).columns == ("model", "context", "tokens_per_second")
    named = make_table(ROWS, ["validation_loss", "context"])
    assert (named.columns, named.cells[0]) == (("validation_loss", "context"), ["-", "1,024"])


def test_markdown_aligns_numbers_right_and_shows_missing_values_as_a_dash():
    assert make_table(ROWS).markdown() == (
        "| model | context | tokens/s |\n"
        "| :--- | ---: | ---: |\n"
        "| gpt2-124m | 1,024 | 412,345 |\n"
        "| gpt2-124m | 2,048 | - |\n"
    )


def test_markdown_shows_its_own_signs_and_those_of_html_as_they_are():
    (line,) = (
        make_table([{"recipe": "a|b `c` <img src=x> [d](e) \\\n\n# f"}]).markdown().splitlines()[2:]
    )
    assert line == "| a\\|b \\`c\\` &lt;img src=x> \\[d\\](e) \\\\ # f |"


def test_a_failed_row_stays_with_its_status_and_its_error_below():
    table = make_table([*ROWS, FAILED])
    assert table.columns[-1] == "status"
    assert [row[-1] for row in table.cells] == ["ok", "ok", "failed"]
    assert table.notes == ("context 4,096: failed (RuntimeError: a | b <c> second line)",)
    assert table.markdown().endswith(
        "- context 4,096: failed (RuntimeError: a \\| b &lt;c> second line)\n"
    )


def test_a_long_error_stays_one_readable_line():
    note = make_table([{**FAILED, "error": "word " * 200}]).notes[0]
    assert len(note) < 260
    assert note.endswith("...)")


@pytest.mark.parametrize("terminal", [True, False])
def test_no_figure_is_cut_however_narrow_the_terminal(terminal: bool):
    row = {f"measure_{index}": 412345 + index for index in range(12)}
    text = printed(make_table([row]), terminal)
    assert all(f"{value:,}" in text for value in row.values())


def test_square_brackets_are_text_on_the_terminal_not_markup():
    assert "[red]x[/red]" in printed(make_table([{"model": "[red]x[/red]"}]))


def test_the_title_and_the_failures_are_printed_around_the_table():
    lines = printed(make_table([*ROWS, FAILED], title="recipe gpt2")).splitlines()
    assert lines[0].strip() == "recipe gpt2"
    assert lines[-1].startswith("context 4,096: failed")
