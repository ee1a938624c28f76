"""What a benchmark of training steps shows: every implementation at its best batch, its speed-up, and the paper's;
speed and memory against context.

Speed-ups are over Hugging Face's eager GPT-2 of the same size, context and precision of weights, at its best batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row, has_failed, status_text, values_of
from flashtrain.report.table import Table, View, make_table
from flashtrain_recipes.step_benchmark.command_cost import COMMAND
from flashtrain_recipes.step_benchmark.contenders import BASELINE, FLASHTRAIN
from flashtrain_recipes.step_benchmark.measure import NO_TIME

# FlashAttention (Dao et al. 2022, arXiv 2205.14135), Table 2: days to train GPT-2 on OpenWebText on 8 A100, to the same
# perplexity for every implementation, and the speed-up over Hugging Face as printed there.
PAPER_GPT2 = "FlashAttention (Dao et al. 2022), Table 2: days on 8 A100"
PAPER_CONTEXT = 1024
PAPER_DAYS: dict[str, dict[str, float]] = {
    "124m": {"Hugging Face": 9.5, "Megatron-LM": 4.7, "FlashAttention": 2.7},
    "355m": {"Hugging Face": 21.0, "Megatron-LM": 11.5, "FlashAttention": 6.9},
}
PAPER_SPEEDUPS: dict[str, dict[str, float]] = {
    "124m": {"Hugging Face": 1.0, "Megatron-LM": 2.0, "FlashAttention": 3.5},
    "355m": {"Hugging Face": 1.0, "Megatron-LM": 1.8, "FlashAttention": 3.0},
}

_CASE = ("model", "context", "weights")
# Which of ours stands beside a row of the paper's table.
_COUNTERPARTS = {"Hugging Face": BASELINE, "FlashAttention": FLASHTRAIN}

Rows = Sequence[Mapping[str, Any]]


def judged(rows: Rows) -> list[Row]:
    """The rows, those with figures with `best_batch` (of their implementation and case) and `speedup` (None where the
    baseline has no figure); ours and the baseline also with the paper's speed-up, where it has their case."""
    fastest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        key = (*_case(row), row["implementation"])
        if _rate(row) > _rate(fastest.get(key, {})):
            fastest[key] = row
    found = []
    for row in rows:
        told = dict(row)
        if _rate(row):
            baseline = fastest.get((*_case(row), BASELINE))
            told["best_batch"] = fastest.get((*_case(row), row["implementation"])) is row
            told["speedup"] = None if baseline is None else round(_rate(row) / _rate(baseline), 3)
            paper = _papers(row)
            if paper is not None and told["best_batch"]:
                told["paper_speedup"] = paper
        found.append(told)
    return found


def best_rows(rows: Rows) -> list[Row]:
    """One row for each implementation and case: at its best batch, or the one that says why there is no figure."""
    chosen: dict[tuple[Any, ...], Row] = {}
    for row in judged(rows):
        key = (*_case(row), row["implementation"])
        if key not in chosen or row.get("best_batch"):
            chosen[key] = row
    return list(chosen.values())


def step_tables(rows: Rows) -> list[Table]:
    """Each implementation at its best batch; the paper's Table 2 beside ours; tokens/s at every batch where several."""
    found = best_rows(rows)
    measures = ["tokens_per_second", "mfu", "peak_memory_gib", "milliseconds", "compile_seconds", "speedup"]
    extra = [key for key in ("memory_estimate_gib", "memory", "paper_speedup", "command_cost") if values_of(found, key)]
    columns = [*_CASE, "implementation", "batch", *[key for key in measures if values_of(found, key)], *extra]
    tables = [make_table(found, columns, "training steps, each implementation at its best batch")]
    beside = paper_rows(found)
    if beside:
        columns = ["model", "implementation", "paper_days", "paper_speedup", "counterpart", "weights", "speedup"]
        tables.append(make_table(beside, columns, f"beside {PAPER_GPT2}, and the speed-ups here"))
    if len(values_of(rows, "batch")) > 1 and len(values_of(rows, "context")) == 1:
        kept = [row for row in rows if row.get("batch") is not None and row["implementation"] != COMMAND]
        tables.append(View([*_CASE, "batch"], "implementation", "tokens_per_second").table(kept, "tokens/s"))
    return tables


def paper_rows(found: Rows) -> list[Row]:
    """The paper's Table 2, a row for each of its entries and each precision of weights here: implementation (theirs),
    paper_days, paper_speedup, counterpart (ours) and its speedup. Only models measured at the paper's context."""
    rows = []
    for model, days in PAPER_DAYS.items():
        ours = [row for row in found if row["model"] == model and row["context"] == PAPER_CONTEXT and _rate(row)]
        for weights in values_of(ours, "weights"):
            speedups = {row["implementation"]: row.get("speedup") for row in ours if row["weights"] == weights}
            for name, value in days.items():
                counterpart = _COUNTERPARTS.get(name)
                rows.append(
                    {
                        "model": model,
                        "implementation": f"{name} (paper)",
                        "paper_days": value,
                        "paper_speedup": PAPER_SPEEDUPS[model][name],
                        "counterpart": counterpart,
                        "weights": weights,
                        "speedup": speedups.get(counterpart),
                    }
                )
    return rows


def case_line(rows: Rows) -> str:
    """One case's rows in a line: tokens/s at each batch of each implementation, or what happened to it."""
    parts = []
    for name in values_of(rows, "implementation"):
        own = [row for row in rows if row["implementation"] == name]
        told = [f"{row['tokens_per_second']:,.0f} (batch {row['batch']})" for row in own if _rate(row)]
        told += [
            status_text(row) + ("" if row["batch"] is None else f" ({row['batch']})") for row in own if has_failed(row)
        ]
        parts.append(f"{name} {', '.join(told)}")
    return "; ".join(parts)


def _papers(row: Mapping[str, Any]) -> float | None:
    """The paper's speed-up of this row's counterpart."""
    if row["context"] != PAPER_CONTEXT:
        return None
    theirs = PAPER_SPEEDUPS.get(row["model"], {})
    return next((theirs.get(name) for name, ours in _COUNTERPARTS.items() if ours == row["implementation"]), None)


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _CASE)


def _rate(row: Mapping[str, Any]) -> float:
    """Tokens/s, 0 where the row has none."""
    return 0.0 if has_failed(row) else float(row.get("tokens_per_second") or 0.0)


_MEASURES = ("tokens_per_second", "mfu", "peak_memory_gib")


def context_speed_figure(rows: Rows, path: str | Path) -> Path:
    """Draw tokens/s, MFU and peak memory against context, each implementation at its best batch, as a PNG at `path`.

    Running out of memory is a cross; what was not measured for another reason (no time, not installed) is left out.
    Raises UserError for rows without two contexts.
    """
    shown = [
        row
        for row in best_rows(rows)
        if not has_failed(row) or (status_text(row) == OUT_OF_MEMORY and row.get("status") != NO_TIME)
    ]
    if len(values_of(shown, "context")) < 2:
        raise UserError("no two contexts were measured: there is no curve to draw.")
    measures = [key for key in _MEASURES if values_of(shown, key)]
    groups = ["implementation", *[key for key in ("model", "weights") if len(values_of(shown, key)) > 1]]
    return line_figure(shown, "context", measures, groups, path)
