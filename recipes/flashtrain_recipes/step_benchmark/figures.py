"""Comparisons of GPT-2's training steps: best batches, speed-ups next to the paper's, speed
and memory by context."""

from __future__ import annotations

from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain.report.figures import line_figure
from flashtrain_recipes.harness.rows import Over, Row, Rows, status_text, values_of
from flashtrain_recipes.step_benchmark.baselines import EAGER, FLASHTRAIN

# FlashAttention (Dao et al. 2022, arXiv 2205.14135), Table 2: speed-up over Hugging
# Face of GPT-2 on 8 A100.
PAPER_CONTEXT = 1024
PAPER_SPEEDUPS = {"124m": {EAGER: 1.0, FLASHTRAIN: 3.5}, "355m": {EAGER: 1.0, FLASHTRAIN: 3.0}}

RATE = "tokens_per_second"
_CASE = ("model", "context", "weights")
_SAME = (*_CASE, "implementation", "pattern")
SPEEDUP = Over("speedup", RATE, _CASE, lambda row: bool(row["implementation"] == EAGER))


def with_best_batches(rows: Rows) -> list[Row]:
    """Return the rows, to measured ones of which the column `best_batch` is added: whether no other
    batch size of the implementation is faster.

    At their best batch, rows of flashtrain and of Hugging Face's eager GPT-2 also get the paper's
    speed-up as `paper_speedup`, where the paper measured their model and context.
    """
    found = []
    for row in rows:
        more: Row = {}
        if row.get(RATE):
            alike = [
                one
                for one in rows
                if one.get(RATE) and all(one.get(key) == row.get(key) for key in _SAME)
            ]
            more["best_batch"] = max(alike, key=lambda one: one[RATE]) is row
            paper = PAPER_SPEEDUPS.get(row["model"], {}).get(row["implementation"])
            measured = row["context"] == PAPER_CONTEXT and "pattern" not in row
            if paper is not None and measured and more["best_batch"]:
                more["paper_speedup"] = paper
        found.append({**row, **more})
    return found


def context_speed_figure(rows: Rows, path: str | Path) -> Path:
    """Draw tokens/s and peak memory against context as a PNG, each
    implementation at its best batch.

    Cases that ran out of memory are marked; others that were not measured are left out.

    Raises:
        UserError: the rows have fewer than two contexts.
    """
    shown = []
    for row in rows:
        if row.get("best_batch") or status_text(row) == OUT_OF_MEMORY:
            name = row["implementation"].replace("plain PyTorch, standard", "standard")
            shown.append({**row, "implementation": name.replace("plain PyTorch,", "PyTorch")})
    if len(values_of(shown, "context")) < 2:
        raise UserError("fewer than two contexts were measured: there is no curve to draw.")
    tokens = min(row["context"] * row["batch"] for row in shown)
    sizes = ", ".join(values_of(shown, "model")).upper()
    family = "decoders of" if any("pattern" in row for row in shown) else "GPT-2"
    title = f"{family} {sizes}: training steps of {tokens:,} tokens, or of one longer sequence"
    group = [
        "implementation",
        *(key for key in ("pattern", "model", "weights") if len(values_of(shown, key)) > 1),
    ]
    return line_figure(shown, "context", (RATE, "peak_memory_gib"), group, path, title=title)


def landing_figure(rows: Rows, path: str | Path) -> Path:
    """Draw `context_speed_figure` without implementations that ran out of memory, and with steps of
    longer trainings (recipe=gpt2) on one device."""
    failed = {row["implementation"] for row in rows if status_text(row) == OUT_OF_MEMORY}
    shown = [row for row in rows if row.get("best_batch") and row["implementation"] not in failed]
    for row in rows:
        model = row["model"].removeprefix("gpt2-") if row.get("devices") == 1 else None
        if model in values_of(shown, "model"):
            own = {"implementation": FLASHTRAIN, "model": model, "weights": shown[0]["weights"]}
            shown.append({**row, **own, "best_batch": True})
    return context_speed_figure(shown, path)
