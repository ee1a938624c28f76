"""Tables and figures of attention: a row a shape and direction, a column an implementation; time and memory against
length, as in the FlashAttention paper and with its values; and one figure of many shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain.report.figures import DPI, GRID, INK, WIDTH_INCHES, colour, line_figure, marker, save
from flashtrain.report.formats import figure_text
from flashtrain.report.rows import Row, has_failed, status_text, values_of
from flashtrain.report.table import Table, View

# FlashAttention (Dao et al. 2022, arXiv 2205.14135), appendix: forward + backward in milliseconds on an A100-40GB,
# batch 16, 8 heads of 64, by sequence length. "PyTorch" is standard attention, which ran out of memory at 16K.
PAPER = "FlashAttention (Dao et al. 2022), appendix, A100-40GB"
PAPER_MILLISECONDS: dict[str, dict[int, float]] = {
    "PyTorch": {512: 1.18, 1024: 3.67, 2048: 13.22, 4096: 50.44},
    "FlashAttention": {512: 0.73, 1024: 2.29, 2048: 7.64, 4096: 30.09, 16384: 470.5, 65536: 7493.0},
    "block-sparse FlashAttention": {512: 0.82, 1024: 0.88, 2048: 1.71, 4096: 3.21, 16384: 12.6, 65536: 50.4},
}
PAPER_SHAPE = {"batch": 16, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "dropout": 0.0}
_HEIGHT = 5.2
_INCHES_A_SHAPE = 0.21
_DOT_SHAPE = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "mask", "features", "dropout", "dtype")
_SHAPE = (
    "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "mask", "cache", "density", "features", "dropout",
)  # fmt: skip
_MEASURES = {
    "tflops": "TFLOP/s",
    "milliseconds": "milliseconds",
    "host_us": "microseconds of the processor a call",
    "host_milliseconds": "milliseconds with launching",
    "of_plain": "speed over the call without features",
    "gb_per_second": "GB/s of keys and values",
    "peak_memory_mib": "peak memory, MiB beyond the inputs",
    "error": "largest error over the float64 reference's largest value",
}

Rows = Sequence[Mapping[str, Any]]


def paper_rows(lengths: list[int]) -> list[dict[str, Any]]:
    """The paper's values at these lengths as rows: implementation, seqlen_q, forward_backward_milliseconds."""
    return [
        {"implementation": f"{name} (paper)", "seqlen_q": length, "forward_backward_milliseconds": value}
        for name, values in PAPER_MILLISECONDS.items()
        for length, value in values.items()
        if length in lengths
    ]


def runtime_figure(rows: Rows, path: str | Path) -> Path:
    """Draw forward + backward milliseconds of the largest family at `path`, and the other families beside it.

    Where a family has the paper's shape, the paper's own values are lines of it. Raises UserError for rows that have
    no two lengths of one shape.
    """
    return _draw(rows, Path(path), "forward_backward_milliseconds")


def memory_figure(rows: Rows, path: str | Path) -> Path:
    """The same of peak memory in MiB, of forward and backward together, beyond the inputs."""
    return _draw(rows, Path(path), "peak_memory_mib")


def families(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each family by its name in words, those of most lengths first; only families with two lengths."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        # of several densities each would be a line of its own at one length: only the butterfly has a length's figure
        known = row.get("milliseconds") is not None or row.get("status") == OUT_OF_MEMORY
        if known and row["direction"] != "plan" and row["mask"] != "block-random":
            found.setdefault(_name(row), []).append(dict(row))
    several = {name: kept for name, kept in found.items() if len(_lengths(kept)) > 1}
    return dict(sorted(several.items(), key=lambda item: -len(_lengths(item[1]))))


def both_directions(rows: Rows) -> list[Row]:
    """One row for each implementation and length that has both directions, their times added and memory the larger.

    A direction that ran out of memory makes the row a failed one.
    """
    pairs: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        pairs.setdefault((row["implementation"], row["seqlen_q"], row["batch"]), {})[row["direction"]] = row
    joined = []
    for (implementation, length, batch), directions in pairs.items():
        told: Row = {"implementation": implementation, "seqlen_q": length, "batch": batch}
        failed = [row for row in directions.values() if has_failed(row)]
        if failed:
            joined.append({**told, "status": status_text(failed[0])})
        elif len(directions) == 2:
            memory = [row["peak_memory_mib"] for row in directions.values() if row.get("peak_memory_mib") is not None]
            time = sum(row["milliseconds"] for row in directions.values())
            measured = {"forward_backward_milliseconds": time, "peak_memory_mib": max(memory, default=None)}
            joined.append({**told, **measured})
    return joined


def _draw(rows: Rows, path: Path, measure: str) -> Path:
    found = families(rows)
    if not found or not (measure != "peak_memory_mib" or values_of(rows, measure)):
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    for number, (name, kept) in enumerate(found.items()):
        drawn = both_directions(kept)
        title = name
        is_the_papers = all(row.get(key) == value for row in kept for key, value in PAPER_SHAPE.items())
        if measure != "peak_memory_mib" and is_the_papers:
            published = paper_rows(_lengths(kept))
            drawn += published
            title += f"; (paper): {PAPER}" if published else ""
        place = family_path(path, number, name)
        line_figure(drawn, "seqlen_q", measure, "implementation", place, title=title, log_y=True, height=_HEIGHT)
    return path


def _name(row: Mapping[str, Any]) -> str:
    parts = [heads_of(row), row["mask"], row.get("features")]
    parts += [f"dropout {row['dropout']:g}" if row["dropout"] else None, row["dtype"]]
    return ", ".join(str(part) for part in parts if part)


def _lengths(rows: Rows) -> list[int]:
    return sorted({row["seqlen_q"] for row in rows})


def heads_of(row: Mapping[str, Any]) -> str:
    """A row's heads in words."""
    groups = "" if row["heads"] == row["kv_heads"] else f" ({row['kv_heads']} KV)"
    return f"{row['heads']} heads{groups} of {row['head_dim']}"


def family_path(path: Path, number: int, name: str) -> Path:
    """Where a family's figure goes: the first one's to `path`, the others' beside it."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return path if number == 0 else path.with_name(f"{path.stem}-{slug}{path.suffix}")


def dot_figure(rows: Rows, path: str | Path) -> Path:
    """Draw TFLOP/s of every shape as a PNG at `path`, the first implementation of the rows on top of the others.

    Raises UserError for rows of which none has TFLOP/s in a direction.
    """
    measured = [row for row in rows if row.get("tflops") is not None and row.get("direction")]
    if not measured:
        raise UserError("no row has TFLOP/s of a direction: there is nothing to draw.")
    shapes = list(dict.fromkeys(_shape(row) for row in measured))
    names = [str(name) for name in values_of(measured, "implementation")]
    directions = [name for name in ("forward", "backward") if any(row["direction"] == name for row in measured)]
    height = 1.3 + _INCHES_A_SHAPE * len(shapes)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for place, direction in enumerate(directions):
        panel = figure.add_subplot(1, len(directions), place + 1)
        panel.set_title(f"{direction}, TFLOP/s", fontsize=9.5, color=INK)
        for number in range(len(shapes)):
            panel.axhline(number, color=GRID, linewidth=0.8, zorder=0)
        for number, name in reversed(list(enumerate(names))):
            own = [row for row in measured if row["implementation"] == name and row["direction"] == direction]
            at = [shapes.index(_shape(row)) for row in own]
            size = 52 if number == 0 else 26
            panel.scatter(
                [row["tflops"] for row in own], at, s=size, marker=marker(number), color=colour(number), zorder=2
            )
        panel.set_ylim(len(shapes) - 0.4, -0.6)
        panel.set_xlim(left=0)
        panel.set_yticks(range(len(shapes)), [figure_text(_label(shape)) for shape in shapes] if place == 0 else [])
        panel.tick_params(labelsize=7.5, colors=INK, length=0)
        for side in panel.spines.values():
            side.set_visible(False)
    handles = [
        Line2D([], [], color=colour(i), marker=marker(i), markersize=7 if i == 0 else 5, linestyle="", label=label)
        for i, label in enumerate(map(figure_text, names))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=INK)
    return save(figure, Path(path))


def _shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in _DOT_SHAPE)


def _label(shape: tuple[Any, ...]) -> str:
    batch, heads, kv_heads, queries, keys, head_dim, mask, features, dropout, _dtype = shape
    length = f"{queries:,}" if keys in (None, queries) else f"{queries:,} x {keys:,}"
    grouped = f"{heads}/{kv_heads}" if kv_heads not in (None, heads) else f"{heads}"
    extra = "".join(f", {word}" for word in (features, f"dropout {dropout:g}" if dropout else None) if word)
    return f"{batch} x {length}, {grouped} heads of {head_dim}, {mask}{extra}"


def tables(rows: Rows) -> list[Table]:
    """One wide table for each measure that the rows have."""
    found = []
    rows = [row for row in rows if row.get("direction")]
    for measure, title in _MEASURES.items():
        kept = [row for row in rows if row.get(measure) is not None or (has_failed(row) and measure == "tflops")]
        if kept and values_of(kept, measure):
            found.append(View(_index(rows, kept), "implementation", measure).table(kept, title))
    return found


def _index(rows: Rows, kept: Rows) -> list[str]:
    """The columns that tell shapes apart: those that differ, and always the length, head dimension and mask."""
    always = ("seqlen_q", "head_dim", "mask")
    told = [key for key in _SHAPE if key in always or len(values_of(rows, key)) > 1]
    if "seqlen_k" in told and all(row["seqlen_k"] == row["seqlen_q"] for row in rows):
        told.remove("seqlen_k")
    if "kv_heads" in told and all(row["kv_heads"] == row["heads"] for row in rows):
        told.remove("kv_heads")
    return [*[key for key in told if values_of(kept, key)], "direction"]
