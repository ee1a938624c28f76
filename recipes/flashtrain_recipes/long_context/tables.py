"""The table that ends a comparison of context lengths."""

from __future__ import annotations

from collections.abc import Sequence

from flashtrain.report.rows import Row
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.long_context.compare import LENGTHS
from flashtrain_recipes.long_context.published import PAPER, meets_the_paper

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
