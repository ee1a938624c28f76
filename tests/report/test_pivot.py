from __future__ import annotations

import pytest

from flashtrain.errors import UserError
from flashtrain.report.rows import has_failed
from flashtrain.report.table import View, make_table, view_of

ROWS = [
    {
        "seqlen_q": 1024,
        "direction": "forward",
        "implementation": "flashtrain",
        "tflops": 250.0,
        "error": 0.002,
    },
    {
        "seqlen_q": 1024,
        "direction": "forward",
        "implementation": "cuDNN",
        "tflops": 337.0,
        "error": 0.002,
    },
    {
        "seqlen_q": 1024,
        "direction": "backward",
        "implementation": "flashtrain",
        "tflops": 217.0,
        "error": 0.003,
    },
    {
        "seqlen_q": 4096,
        "direction": "forward",
        "implementation": "flashtrain",
        "tflops": 300.0,
        "error": 0.002,
    },
    {
        "seqlen_q": 4096,
        "direction": "forward",
        "implementation": "cuDNN",
        "tflops": None,
        "status": "out of memory",
    },
]


def test_a_key_becomes_columns_of_another_keys_values():
    table = View(["seqlen_q", "direction"], "implementation", "tflops").table(ROWS)
    assert table.headings == ["query length", "direction", "flashtrain", "cuDNN"]
    assert table.cells == [
        ["1,024", "forward", "250", "337"],
        ["1,024", "backward", "217", "-"],
        ["4,096", "forward", "300", "out of memory"],
    ]


def test_only_some_of_the_rows():
    view = view_of(
        {
            "columns": "seqlen_q",
            "pivot": "implementation",
            "value": "tflops",
            "only": "direction:backward",
        }
    )
    assert view.table(ROWS).cells == [["1,024", "217"]]
    assert view_of({"only": "implementation:!DNN"}).table(ROWS).cells == (
        view_of({"only": "implementation:flashtrain"}).table(ROWS).cells
    )
    assert view_of({"only": "seqlen_q:4096"}).table(ROWS[:4]).cells[0][:2] == [
        "flashtrain",
        "forward",
    ]


def test_several_values_for_one_cell_give_their_median():
    rows = [{"a": 1, "b": "x", "c": value} for value in (1.0, 9.0, 2.0)]
    assert View(["a"], "b", "c").table(rows).rows[0]["x"] == 2.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pivot": "implementation", "value": "tflops"}, "pivot=KEY needs columns="),
        ({"columns": "seqlen_q", "pivot": "implementation"}, "pivot=KEY needs columns="),
        (
            {"columns": "seqlen", "pivot": "implementation", "value": "tflops"},
            "unknown column 'seqlen'",
        ),
        ({"only": "direction"}, "expected pairs key:value"),
        ({"only": "way:forward"}, "unknown column 'way'"),
        ({"only": "direction:up"}, "no row has direction=up"),
        ({"pivots": "a"}, "unknown table option 'pivots'"),
    ],
)
def test_a_view_that_cannot_be_is_one_line(options, said: str):
    with pytest.raises(UserError, match=said):
        view_of(options).table(ROWS)


def test_a_measured_error_is_a_column_and_no_failure():
    assert not has_failed(ROWS[0])
    table = make_table(ROWS[:2])
    assert "error" in table.columns
    assert table.notes == ()
    assert "status" not in table.columns
