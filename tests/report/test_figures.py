from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pytest
from PIL import Image

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure, lowest, sweep_figure, tokens_label


def row(context: int, attention: str = "flash", **more: object) -> dict:
    return {
        "context": context,
        "attention": attention,
        "tokens_per_second": 4e8 / context,
        "peak_memory_gib": 20.0,
        "validation_loss": 3.3,
        "status": "ok",
        **more,
    }


SWEEP = [
    row(1024 * 2**power, attention) for attention in ("flash", "standard") for power in range(4)
]
OUT_OF_MEMORY = {
    "context": 16384,
    "attention": "standard",
    "status": "out of memory",
    "error": "CUDA out of memory",
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """The figures that were saved, to look into."""
    figures: list[matplotlib.figure.Figure] = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure: matplotlib.figure.Figure, *arguments: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return figures


def texts(panel: matplotlib.axes.Axes) -> list[str]:
    return [text.get_text() for text in panel.texts]


def names(figure: matplotlib.figure.Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_the_context_figure_is_a_png_1200_pixels_wide(tmp_path: Path):
    path = sweep_figure(SWEEP, tmp_path / "new" / "sweep.png")
    picture = Image.open(path)
    assert (picture.format, picture.width) == ("PNG", 1200)


def test_three_panels_with_a_line_for_each_attention(tmp_path: Path, drawn: list):
    sweep_figure(SWEEP, tmp_path / "sweep.png")
    panels = drawn[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "tokens/s",
        "peak memory (GiB)",
        "validation loss",
    ]
    assert [len(panel.lines) for panel in panels] == [2, 2, 2]
    assert names(drawn[0]) == ["flash", "standard"]
    sweep_figure([row(8, validation_loss=None, train_loss=3.0)], tmp_path / "not-validated.png")
    assert drawn[1].axes[2].get_title(loc="left") == "training loss"


def test_the_context_axis_is_ticked_in_powers_of_two(tmp_path: Path, drawn: list):
    sweep_figure(SWEEP, tmp_path / "sweep.png")
    panel = drawn[0].axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1K", "2K", "4K", "8K"]
    assert list(panel.get_xticks()) == [10, 11, 12, 13]


def test_a_lines_name_says_where_its_jobs_failed(tmp_path: Path, drawn: list):
    sweep_figure([*SWEEP, OUT_OF_MEMORY], tmp_path / "sweep.png")
    assert names(drawn[0]) == ["flash", "standard (out of memory at 16K)"]
    sweep_figure(
        [*SWEEP, OUT_OF_MEMORY, {**OUT_OF_MEMORY, "context": 32768}], tmp_path / "longer.png"
    )
    assert names(drawn[1]) == ["flash", "standard (out of memory from 16K)"]
    sweep_figure([OUT_OF_MEMORY], tmp_path / "failed.png")
    assert texts(drawn[2].axes[0]) == ["not measured"]
    assert names(drawn[2]) == ["(out of memory at 16K)"]


def test_few_lines_have_their_names_at_their_ends_and_none_overlap(tmp_path: Path, drawn: list):
    rows = [
        row(context, name, mfu=0.4)
        for name in ("flash", "equal", "standard")
        for context in (1024, 2048, 4096)
    ]
    rows = [each for each in rows if (each["attention"], each["context"]) != ("standard", 4096)]
    line_figure(
        [*rows, {**OUT_OF_MEMORY, "context": 4096}],
        "context",
        "mfu",
        "attention",
        tmp_path / "a.png",
    )
    (panel,) = drawn[0].axes
    assert drawn[0].legends == []
    assert sorted(texts(panel)) == ["equal", "flash", "standard (out of\nmemory at 4K)"]
    boxes = [text.get_window_extent() for text in panel.texts]
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


def test_the_title_names_the_card_and_the_day(tmp_path: Path, drawn: list):
    rows = [{**each, "measured": "NVIDIA H200, 2026-11-22"} for each in SWEEP]
    line_figure(rows, "context", "peak_memory_gib", "attention", tmp_path / "a.png", title="GPT-2")
    assert drawn[0]._suptitle.get_text() == "GPT-2\nNVIDIA H200, 2026-11-22"


def test_runs_that_differ_in_nothing_shown_are_drawn_at_their_median(tmp_path: Path, drawn: list):
    rows = [{"x": 1, "loss": value} for value in (1.0, 2.0, 9.0)]
    line_figure(rows, "x", "loss", None, tmp_path / "line.png")
    assert list(drawn[0].axes[0].lines[0].get_ydata()) == [2.0]


def test_an_interval_is_a_bar_that_the_axis_holds(tmp_path: Path, drawn: list):
    rows = [
        {"x": 1, "loss": 3.0, "loss_low": 2.0, "loss_high": 5.0},
        {"x": 2, "loss": 3.1, "loss_low": None},
    ]
    line_figure(rows, "x", "loss", None, tmp_path / "line.png")
    panel = drawn[0].axes[0]
    (bar,) = panel.collections
    assert [tuple(point) for point in bar.get_segments()[0]] == [(1.0, 2.0), (1.0, 5.0)]
    assert panel.get_ylim()[0] < 2
    assert panel.get_ylim()[1] > 5


def test_values_far_apart_get_a_log_axis(tmp_path: Path, drawn: list):
    rows = [{"seqlen_q": 2**power, "milliseconds": 4.0**power} for power in range(7, 12)]
    line_figure(rows, "seqlen_q", "milliseconds", None, tmp_path / "line.png")
    assert drawn[0].axes[0].get_yscale() == "log"


def test_the_course_of_a_run_is_drawn_evenly(tmp_path: Path, drawn: list):
    rows = [{"step": step, "train_loss": 9.0 - step / 100} for step in range(10, 300, 10)]
    line_figure(rows, "step", "train_loss", None, tmp_path / "line.png")
    assert list(drawn[0].axes[0].lines[0].get_xdata()) == [row["step"] for row in rows]


def test_words_make_an_axis_too(tmp_path: Path, drawn: list):
    rows = [{"mask": mask, "tflops": 300.0} for mask in ("full", "causal")]
    line_figure(rows, "mask", "tflops", None, tmp_path / "line.png")
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()] == ["full", "causal"]


def test_a_dollar_begins_no_formula(tmp_path: Path):
    text = "$\\frac{1$"
    rows = [{"x": x, "kind": kind, text: 1.0} for x, kind in (("a", text), (text, "b"))]
    assert (
        line_figure(rows, "x", [text], ["kind"], tmp_path / "f.png", title=text).stat().st_size > 0
    )


def test_a_figure_leaves_out_what_has_no_place(tmp_path: Path, drawn: list):
    nan, inf = float("nan"), float("inf")
    rows = [
        {"context": x, "loss": y, "loss_low": y, "loss_high": y}
        for x, y in ((1.0, 2.0), (inf, 1.0))
    ]
    rows += [{"context": nan, "loss": 1.0}, {"context": 4.0, "loss": nan, "loss_low": inf}]
    line_figure(rows, "context", "loss", None, tmp_path / "f.png")
    assert drawn[0].axes[0].lines[0].get_xydata().tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize(
    ("x", "y", "group"),
    [("contxt", "mfu", None), ("context", "msu", None), ("context", "mfu", "a")],
)
def test_a_key_that_no_row_has_is_refused(tmp_path: Path, x: str, y: str, group: str | None):
    with pytest.raises(UserError, match="unknown column"):
        line_figure([{"context": 8, "mfu": 0.5}], x, y, group, tmp_path / "line.png")


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (512, "512"),
        (1024, "1K"),
        (1536, "1.5K"),
        (131072, "128K"),
        (1048576, "1M"),
        (3000, "3,000"),
    ],
)
def test_lengths_are_labelled_in_powers_of_1024(value: int, label: str):
    assert tokens_label(value) == label


def test_a_title_of_two_lines_and_long_names_stay_within_the_figure(tmp_path: Path, drawn: list):
    names = [f"an implementation with a long name, number {number}" for number in range(5)]
    rows = [row(context, implementation=name) for name in names for context in (1024, 2048)]
    line_figure(
        rows,
        "context",
        "mfu",
        "implementation",
        tmp_path / "a.png",
        title="what was measured\non what",
    )
    (figure,) = drawn
    assert figure._suptitle.get_text() == "what was measured\non what"
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_few_points_are_named_at_the_axis_and_losses_start_at_zero_where_that_is_honest(
    tmp_path: Path, drawn: list
):
    rates = (0.001, 0.0015, 0.00151, 0.003)
    rows = [
        {"optimizer.learning_rate": rate, "train_loss": 1 + 1000 * rate, "accuracy": 0.9}
        for rate in rates
    ]
    line_figure(
        rows, "optimizer.learning_rate", ["train_loss", "accuracy"], None, tmp_path / "a.png"
    )
    loss, accuracy = drawn[0].axes
    # One has no room.
    assert [label.get_text() for label in loss.get_xticklabels()] == ["0.001", "0.00151", "0.003"]
    assert loss.get_ylim()[0] == 0  # 2 to 4
    assert accuracy.get_ylim()[0] == 0
    assert lowest(3.3, 3.5) == pytest.approx(3.276)  # from zero it would be a flat line
    assert lowest(-1, 4) < -1
