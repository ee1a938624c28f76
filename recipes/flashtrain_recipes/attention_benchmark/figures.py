"""Figures of attention: TFLOP/s and memory against length, and TFLOP/s of every shape."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain.report.figures import colour, legend, line_figure, marker, new_figure, save, style
from flashtrain.report.formats import figure_text
from flashtrain_recipes.harness.rows import Row, Rows, has_failed, status_text, values_of

_INCHES_PER_SHAPE = 0.27
_LINES = 4  # of a figure: what is called most
_CALLED = (
    "flashtrain",
    "standard attention",
    "flash-attn-4",
    "torch SDPA, cuDNN",
    "torch SDPA, FlashAttention-2",
)


def lengths_figure(rows: Rows, path: str | Path) -> Path:
    """Draw TFLOP/s (forward and backward together) and peak memory beyond the inputs
    against length as a PNG.

    The shape with the most measured lengths is drawn, and of its implementations four at most.

    Raises:
        UserError: no shape was measured at two lengths.
    """
    name, shape = largest_shape(rows)
    joined = both_directions(_of_few(shape))
    measures = [
        key for key in ("forward_backward_tflops", "peak_memory_gib") if values_of(joined, key)
    ]
    return line_figure(
        joined,
        "seqlen_q",
        measures,
        "implementation",
        path,
        title=f"Attention, {name}",
        log_y=False,
    )


def _of_few(rows: Rows) -> list[Row]:
    names = values_of(rows, "implementation")
    few = sorted(names, key=lambda name: _CALLED.index(name) if name in _CALLED else len(_CALLED))[
        :_LINES
    ]
    return [dict(row) for name in few for row in rows if row["implementation"] == name]


def largest_shape(rows: Rows) -> tuple[str, list[Row]]:
    """Return the name and rows of the shape (heads, mask, features, dtype) with the
    most sequence lengths.

    A length at which memory ran out counts as measured.

    Raises:
        UserError: no shape was measured at two lengths.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        # of several densities each would be a line of its own at one length: only the butterfly
        # has a length's figure
        known = row.get("milliseconds") is not None or row.get("status") == OUT_OF_MEMORY
        if known and row["direction"] != "plan" and row["mask"] != "block-random":
            extra = (
                row.get("features"),
                f"dropout {row['dropout']:g}" if row["dropout"] else None,
                row["dtype"],
            )
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
    """Return a row for each implementation and length that joins its forward and backward row:
    the TFLOP/s of both passes together, and the larger peak memory.

    A failure in one direction becomes the joined row's status.
    """
    pairs: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        pairs.setdefault((row["implementation"], row["seqlen_q"], row["batch"]), {})[
            row["direction"]
        ] = row
    joined = []
    for directions in pairs.values():
        both = {
            key: row.get(key)
            for row in directions.values()
            for key in ("implementation", "seqlen_q", "measured")
        }
        failed = [row for row in directions.values() if has_failed(row)]
        if failed:
            joined.append({**both, "status": status_text(failed[0])})
        elif len(directions) == 2:
            memory = values_of(directions.values(), "peak_memory_mib")
            work = sum(row["milliseconds"] * row["tflops"] for row in directions.values())
            both["forward_backward_tflops"] = work / sum(
                row["milliseconds"] for row in directions.values()
            )
            joined.append({**both, "peak_memory_gib": max(memory) / 1024 if memory else None})
    return joined


def dot_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the TFLOP/s of every shape as dots in a PNG, of four implementations at most;
    flashtrain's are the largest.

    Raises:
        UserError: no row has a forward or backward with TFLOP/s.
    """
    measured = _of_few(
        [row for row in rows if row.get("tflops") is not None and row.get("direction")]
    )
    if not measured:
        raise UserError(
            "no row has both a direction and tflops: expected rows of recipe=attention-benchmark."
        )
    labels = list(
        dict.fromkeys(map(_label, sorted(measured, key=itemgetter("mask", "head_dim", "seqlen_q"))))
    )
    names = values_of(measured, "implementation")
    directions = [
        name
        for name in ("forward", "backward")
        if any(row["direction"] == name for row in measured)
    ]
    figure = new_figure(
        1.5 + _INCHES_PER_SHAPE * len(labels), "Attention (batch x length, heads, mask)", measured
    )
    for place, direction in enumerate(directions):
        panel = figure.add_subplot(1, len(directions), place + 1)
        style(panel, f"{direction}, TFLOP/s")
        for number, name in enumerate(names):
            own = [
                row
                for row in measured
                if row["implementation"] == name and row["direction"] == direction
            ]
            x, y = [row["tflops"] for row in own], [labels.index(_label(row)) for row in own]
            look: dict[str, Any] = {
                "marker": marker(number),
                "color": colour(number),
                "s": 30 if number else 60,
            }
            panel.scatter(x, y, label=figure_text(name), zorder=2 + len(names) - number, **look)
        panel.set_ylim(len(labels) - 0.4, -0.6)
        panel.set_xlim(left=0)
        panel.set_yticks(
            range(len(labels)), [figure_text(label) if place == 0 else "" for label in labels]
        )
    legend(figure, figure.axes[0].get_legend_handles_labels()[0], len(names))
    return save(figure, Path(path))


def _label(row: Mapping[str, Any]) -> str:
    queries, keys = row["seqlen_q"], row.get("seqlen_k")
    length = f"{queries:,}" if keys in (None, queries) else f"{queries:,} x {keys:,}"
    heads, kv_heads = row["heads"], row.get("kv_heads")
    grouped = f"{heads}/{kv_heads}" if kv_heads not in (None, heads) else f"{heads}"
    extra = [row.get("features"), f"dropout {row['dropout']:g}" if row.get("dropout") else None]
    words = "".join(f", {word}" for word in extra if word)
    return (
        f"{row.get('batch')} x {length}, {grouped} heads of {row['head_dim']}, {row['mask']}{words}"
    )
