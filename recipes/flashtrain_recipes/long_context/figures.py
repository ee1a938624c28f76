"""The table and the two figures of recipe=gpt2-long: perplexity and time against context, and loss along the scored
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.long_context.compare import (
    LENGTHS,
    PAPER,
    PAPER_TABLE_4,
    POSITIONS,
    meets_the_paper,
    paper_columns,
)

COLUMNS = (
    "context", "tokens", "perplexity", "perplexity_low", "perplexity_high", "against_shorter", "perplexity_sliding",
    "against_shorter_sliding", "tokens_per_second", "train_seconds", "time_ratio", "peak_memory_gib",
    "paper_perplexity", "paper_days", "paper_time_ratio",
)  # fmt: skip


def lengths_table(rows: Sequence[Row]) -> Table:
    """The table that ends a comparison."""
    lengths = [row for row in rows if row["part"] == LENGTHS]
    first = next((row for row in lengths if row.get("scored_tokens")), None)
    scored = "" if first is None else f"{first['scored_tokens']:,} held-out tokens in {first['units']} {first['unit']}"
    columns = [key for key in COLUMNS if any(row.get(key) is not None for row in lengths)]
    if meets_the_paper(lengths):
        scored += f"; paper: {PAPER}"
    else:
        columns = [key for key in columns if not key.startswith("paper_")]
    return make_table(lengths, columns, scored)


_HEIGHT = 4.2


def lengths_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Perplexity (95% intervals as bars) and time of a token relative to the shortest context, against context.

    The paper's values are a line of their own: another text, so its height is not to be compared, its course is.
    Raises UserError for rows of another recipe.
    """
    own = [row for row in rows if row.get("part") == LENGTHS]
    if not own:
        raise UserError("these rows compare no context lengths: they are not of recipe=gpt2-long.")
    drawn: list[Row] = [{**row, "series": "flashtrain"} for row in own]
    drawn += [_sliding(row) for row in own if row.get("perplexity_sliding") is not None]
    counts = [row["scored_tokens"] for row in own if row.get("scored_tokens")]
    title = f"the same {counts[0]:,} held-out tokens for every context, bars 95%" if counts else ""
    if meets_the_paper(own):
        drawn += _paper()
        title += f"\nbeside {PAPER}"
    return line_figure(drawn, "context", ["perplexity", "time_ratio"], "series", path, title=title, height=_HEIGHT)


def positions_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Loss along the scored tokens, a line a context: reading each window once, and with full context for each token.

    Raises UserError for rows of another recipe.
    """
    own = [row for row in rows if row.get("part") == POSITIONS]
    if not own:
        raise UserError("these rows have no loss by position: they are not of recipe=gpt2-long.")
    return line_figure(own, "position", ["loss", "loss_sliding"], "context", path, height=_HEIGHT)


def _sliding(row: Mapping[str, Any]) -> Row:
    series = "flashtrain, full context for every token"
    return {"context": row["context"], "series": series, "perplexity": row["perplexity_sliding"]}


def _paper() -> list[Row]:
    told = {context: paper_columns(context) for context in PAPER_TABLE_4}
    return [
        {
            "context": context,
            "series": "FlashAttention's Table 4 (OpenWebText)",
            "perplexity": columns["paper_perplexity"],
            "time_ratio": columns["paper_time_ratio"],
        }
        for context, columns in told.items()
    ]
