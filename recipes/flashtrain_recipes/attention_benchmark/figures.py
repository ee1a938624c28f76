"""Figures of attention: time and memory against length, with the FlashAttention paper's values, and TFLOP/s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain.report.figures import DPI, GRID, INK, WIDTH_INCHES, colour, line_figure, marker, save
from flashtrain.report.formats import figure_text
from flashtrain_recipes.harness.rows import Row, Rows, has_failed, status_text, values_of

# FlashAttention (Dao et al. 2022, arXiv 2205.14135), appendix: forward + backward in milliseconds on an A100-40GB,
# batch 16, 8 heads of 64, by sequence length. "PyTorch" is standard attention, which ran out of memory at 16K.
PAPER = "FlashAttention (Dao et al. 2022), appendix, A100-40GB"
PAPER_MILLISECONDS: dict[str, dict[int, float]] = {
    "PyTorch": {512: 1.18, 1024: 3.67, 2048: 13.22, 4096: 50.44},
    "FlashAttention": {512: 0.73, 1024: 2.29, 2048: 7.64, 4096: 30.09, 16384: 470.5, 65536: 7493.0},
    "block-sparse FlashAttention": {512: 0.82, 1024: 0.88, 2048: 1.71, 4096: 3.21, 16384: 12.6, 65536: 50.4},
}
PAPER_SHAPE = {"batch": 16, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "dropout": 0.0}
_INCHES_PER_SHAPE = 0.21


def paper_rows() -> list[dict[str, Any]]:
    """Return the paper's times as rows with implementation, seqlen_q and forward_backward_milliseconds."""
    return [
        {"implementation": f"{name} (paper)", "seqlen_q": length, "forward_backward_milliseconds": value}
        for name, values in PAPER_MILLISECONDS.items()
        for length, value in values.items()
    ]


def runtime_figure(rows: Rows, path: str | Path) -> Path:
    """Draw forward + backward time in milliseconds against sequence length as a PNG.

    The shape with the most measured lengths is drawn; where it is the paper's shape, the paper's values are lines too.

    Raises:
        UserError: no shape was measured at two lengths.
    """
    name, shape = largest_shape(rows)
    lengths = {row["seqlen_q"] for row in shape}
    is_the_papers = all(row.get(key) == value for row in shape for key, value in PAPER_SHAPE.items())
    published = [row for row in paper_rows() if is_the_papers and row["seqlen_q"] in lengths]
    title = f"{name}; (paper): {PAPER}" if published else name
    return _lines([*both_directions(shape), *published], "forward_backward_milliseconds", title, path)


def memory_figure(rows: Rows, path: str | Path) -> Path:
    """Draw peak memory in MiB, beyond the inputs, against sequence length as a PNG.

    The shape with the most measured lengths is drawn.

    Raises:
        UserError: no shape was measured at two lengths, or no row has a peak memory.
    """
    name, shape = largest_shape(rows)
    if not values_of(shape, "peak_memory_mib"):
        raise UserError("no row has peak_memory_mib: there is nothing to draw.")
    return _lines(both_directions(shape), "peak_memory_mib", name, path)


def _lines(rows: Rows, measure: str, title: str, path: str | Path) -> Path:
    return line_figure(rows, "seqlen_q", measure, "implementation", path, title=title, log_y=True, height=5.2)


def largest_shape(rows: Rows) -> tuple[str, list[Row]]:
    """Return the name and rows of the shape (heads, mask, features, dtype) with the most sequence lengths.

    A length at which memory ran out counts as measured.

    Raises:
        UserError: no shape was measured at two lengths.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        # of several densities each would be a line of its own at one length: only the butterfly has a length's figure
        known = row.get("milliseconds") is not None or row.get("status") == OUT_OF_MEMORY
        if known and row["direction"] != "plan" and row["mask"] != "block-random":
            extra = (row.get("features"), f"dropout {row['dropout']:g}" if row["dropout"] else None, row["dtype"])
            groups = "" if row["heads"] == row["kv_heads"] else f" ({row['kv_heads']} KV)"
            heads = f"{row['heads']} heads{groups} of {row['head_dim']}"
            name = ", ".join(str(part) for part in (heads, row["mask"], *extra) if part)
            found.setdefault(name, []).append(dict(row))
    lengths = {name: len({row["seqlen_q"] for row in own}) for name, own in found.items()}
    name = max(lengths, key=lengths.__getitem__, default="")
    if lengths.get(name, 0) < 2:
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    return name, found[name]


def both_directions(rows: Rows) -> list[Row]:
    """Join the forward and backward row of each implementation and length: times added, the larger memory.

    A failure in one direction becomes the joined row's status.
    """
    pairs: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        pairs.setdefault((row["implementation"], row["seqlen_q"], row["batch"]), {})[row["direction"]] = row
    joined = []
    for (implementation, length, batch), directions in pairs.items():
        both: Row = {"implementation": implementation, "seqlen_q": length, "batch": batch}
        failed = [row for row in directions.values() if has_failed(row)]
        if failed:
            joined.append({**both, "status": status_text(failed[0])})
        elif len(directions) == 2:
            memory = values_of(directions.values(), "peak_memory_mib")
            both["forward_backward_milliseconds"] = sum(row["milliseconds"] for row in directions.values())
            joined.append({**both, "peak_memory_mib": max(memory, default=None)})
    return joined


def dot_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the TFLOP/s of every shape as dots in a PNG; the rows' first implementation is drawn over the others.

    Raises:
        UserError: no row has a forward or backward with TFLOP/s.
    """
    measured = [row for row in rows if row.get("tflops") is not None and row.get("direction")]
    if not measured:
        raise UserError("no row has a direction (forward, backward) with TFLOP/s: there is nothing to draw.")
    labels = list(dict.fromkeys(map(_label, measured)))
    names = values_of(measured, "implementation")
    directions = [name for name in ("forward", "backward") if any(row["direction"] == name for row in measured)]
    height = 1.3 + _INCHES_PER_SHAPE * len(labels)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for place, direction in enumerate(directions):
        panel = figure.add_subplot(1, len(directions), place + 1)
        panel.set_title(f"{direction}, TFLOP/s", fontsize=9.5, color=INK)
        panel.grid(axis="y", color=GRID, linewidth=0.8)
        for number, name in enumerate(names):
            own = [row for row in measured if row["implementation"] == name and row["direction"] == direction]
            x, y = [row["tflops"] for row in own], [labels.index(_label(row)) for row in own]
            look: dict[str, Any] = {"marker": marker(number), "color": colour(number), "s": 26 if number else 52}
            panel.scatter(x, y, label=figure_text(name), zorder=2 + len(names) - number, **look)
        panel.set_ylim(len(labels) - 0.4, -0.6)
        panel.set_xlim(left=0)
        panel.set_yticks(range(len(labels)), [figure_text(label) if place == 0 else "" for label in labels])
        panel.tick_params(labelsize=7.5, colors=INK, length=0)
        panel.spines[:].set_visible(False)
    handles, _ = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=INK)
    return save(figure, Path(path))


def _label(row: Mapping[str, Any]) -> str:
    queries, keys = row["seqlen_q"], row.get("seqlen_k")
    length = f"{queries:,}" if keys in (None, queries) else f"{queries:,} x {keys:,}"
    heads, kv_heads = row["heads"], row.get("kv_heads")
    grouped = f"{heads}/{kv_heads}" if kv_heads not in (None, heads) else f"{heads}"
    extra = [row.get("features"), f"dropout {row['dropout']:g}" if row.get("dropout") else None]
    words = "".join(f", {word}" for word in extra if word)
    return f"{row.get('batch')} x {length}, {grouped} heads of {row['head_dim']}, {row['mask']}{words}"
