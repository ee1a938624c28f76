"""What a benchmark of training steps shows: every baseline at its best batch, its speed-up, and the paper's; speed and
memory against context.

Speed-ups are over Hugging Face's eager GPT-2 of the same size, context and precision of weights, at its best batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.table import Table, View, make_table
from flashtrain_recipes.harness.rows import OUT_OF_MEMORY, Row, Rows, over_fastest, status_text, values_of
from flashtrain_recipes.step_benchmark.baselines import EAGER, FLASHTRAIN
from flashtrain_recipes.step_benchmark.command_cost import COMMAND

# FlashAttention (Dao et al. 2022, arXiv 2205.14135), Table 2: speed-up over Hugging Face of GPT-2 on 8 A100.
PAPER_CONTEXT = 1024
PAPER_SPEEDUPS = {"124m": {EAGER: 1.0, FLASHTRAIN: 3.5}, "355m": {EAGER: 1.0, FLASHTRAIN: 3.0}}

RATE = "tokens_per_second"
_CASE = ("model", "context", "weights")
_MEASURES = (RATE, "mfu", "peak_memory_gib")
_COLUMNS = (
    *_CASE, "implementation", "batch", *_MEASURES, "milliseconds", "compile_seconds", "speedup", "memory_estimate_gib",
    "memory", "paper_speedup", "command_cost", "status",
)  # fmt: skip


def compared(rows: Rows) -> list[Row]:
    """The rows, those with figures with `best_batch` (of their implementation and case) and `speedup` (None where the
    baseline has no figure); ours and the baseline also with the paper's speed-up, where it has their case."""
    found = []
    for row in rows:
        more: Row = {}
        if row.get(RATE):
            same = [one for one in rows if _case(one) == _case(row) and one.get(RATE)]
            more["best_batch"] = max(same, key=lambda one: one[RATE]) is row
            more["speedup"] = over_fastest(row, rows, RATE, _CASE, lambda one: one["implementation"] == EAGER)
            paper = PAPER_SPEEDUPS.get(row["model"], {}).get(row["implementation"])
            if paper is not None and row["context"] == PAPER_CONTEXT and more["best_batch"]:
                more["paper_speedup"] = paper
        found.append({**row, **more})
    return found


def best_rows(rows: Rows) -> list[Row]:
    """One row for each implementation and case: at its best batch, or the one that says why there is no figure."""
    chosen: dict[tuple[Any, ...], Row] = {}
    for row in compared(rows):
        if _case(row) not in chosen or row.get("best_batch"):
            chosen[_case(row)] = row
    return list(chosen.values())


def step_tables(rows: Rows) -> list[Table]:
    """Each implementation at its best batch; tokens/s at every batch where several."""
    found = best_rows(rows)
    columns = [key for key in _COLUMNS if values_of(found, key)]
    tables = [make_table(found, columns, "training steps, each implementation at its best batch")]
    if len(values_of(rows, "batch")) > 1 and len(values_of(rows, "context")) == 1:
        kept = [row for row in rows if row.get("batch") is not None and row["implementation"] != COMMAND]
        tables.append(View([*_CASE, "batch"], "implementation", RATE).table(kept, "tokens/s"))
    return tables


def context_speed_figure(rows: Rows, path: str | Path) -> Path:
    """Draw tokens/s, MFU and peak memory against context, each implementation at its best batch, as a PNG at `path`.

    Running out of memory is a cross; what was not measured for another reason (no time, not installed) is left out.
    Raises UserError for rows without two contexts.
    """
    shown = [row for row in best_rows(rows) if row.get(RATE) or status_text(row) == OUT_OF_MEMORY]
    if len(values_of(shown, "context")) < 2:
        raise UserError("no two contexts were measured: there is no curve to draw.")
    measures = [key for key in _MEASURES if values_of(shown, key)]
    groups = ["implementation", *[key for key in ("model", "weights") if len(values_of(shown, key)) > 1]]
    return line_figure(shown, "context", measures, groups, path)


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in (*_CASE, "implementation"))
