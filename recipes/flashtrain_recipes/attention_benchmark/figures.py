"""The FlashAttention paper's two figures: forward + backward time, and memory, against sequence length.

A family is everything of a shape but its length and batch: each family of at least two lengths gets a figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row, has_failed, status_text
from flashtrain_recipes.attention_benchmark.published import PAPER, PAPER_SHAPE, paper_rows

_HEIGHT = 5.2

Rows = Sequence[Mapping[str, Any]]


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
        if row.get("direction") in ("forward", "backward") and row.get("mask") != "block-random":
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
    if not found:
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    for number, (name, kept) in enumerate(found.items()):
        drawn = both_directions(kept)
        title = name
        if measure != "peak_memory_mib" and all(_is_the_papers(row) for row in kept):
            published = paper_rows(_lengths(kept))
            drawn += published
            title += f"; (paper): {PAPER}" if published else ""
        place = path if number == 0 else path.with_name(f"{path.stem}-{_slug(name)}{path.suffix}")
        line_figure(drawn, "seqlen_q", measure, "implementation", place, title=title, log_y=True, height=_HEIGHT)
    return path


def _is_the_papers(row: Mapping[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in PAPER_SHAPE.items())


def _name(row: Mapping[str, Any]) -> str:
    groups = "" if row["heads"] == row["kv_heads"] else f" ({row['kv_heads']} KV)"
    parts = [f"{row['heads']} heads{groups} of {row['head_dim']}", row["mask"], row.get("features")]
    parts += [f"dropout {row['dropout']:g}" if row["dropout"] else None, row["dtype"]]
    return ", ".join(str(part) for part in parts if part)


def _lengths(rows: Rows) -> list[int]:
    return sorted({row["seqlen_q"] for row in rows})


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
