"""The table that recipe=gpt2-long repeats: FlashAttention (Dao et al. 2022, arXiv 2205.14135), Table 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PAPER = "FlashAttention (Dao et al. 2022), Table 4: GPT-2 small on OpenWebText, 8 A100"

# Context -> (perplexity on OpenWebText, days of training), of GPT-2 small with FlashAttention.
PAPER_TABLE_4: dict[int, tuple[float, float]] = {1024: (18.2, 2.7), 2048: (17.6, 3.0), 4096: (17.5, 3.6)}


def paper_columns(context: int) -> dict[str, float | None]:
    """The paper's perplexity, days and time relative to 1K at this context; None where it has none."""
    perplexity, days = PAPER_TABLE_4.get(context, (None, None))
    ratio = None if days is None else round(days / PAPER_TABLE_4[1024][1], 3)
    return {"paper_perplexity": perplexity, "paper_days": days, "paper_time_ratio": ratio}


def meets_the_paper(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two of the paper's contexts are among the rows': one alone, as in the demo, is no comparison."""
    return len({row["context"] for row in rows} & set(PAPER_TABLE_4)) > 1
