"""The longest sequences that Hugging Face decoders were trained on, and those that
a plan says would fit."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.report.rows import values_of
from flashtrain_recipes.harness.figures import Bar, bar_figure
from flashtrain_recipes.harness.rows import Rows


def longest_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the longest sequence of each model and machine as bars in a PNG: a filled bar for
    steps that were run, an outlined one for those that were only planned.

    Rows that were only planned have no step_seconds.

    Raises:
        UserError: no row has a model and an estimate of its memory.
    """
    own = [
        row
        for row in rows
        if row.get("model") and row.get("memory_estimate_gib") and row.get("devices")
    ]
    if not own:
        raise UserError(
            "no row has a memory estimate: draw this figure from the result.json of recipe=hf-long."
        )
    groups: dict[str, list[Bar]] = {}
    machines = sorted(values_of(own, "measured"), key=lambda text: ("2 x" in text, text)) or [None]
    for model, machine in product(values_of(own, "model"), machines):
        here = [row for row in own if row["model"] == model and row.get("measured") == machine]
        for ran in (True, False):
            these = [row for row in here if bool(row.get("step_seconds")) == ran]
            if not these:
                continue
            longest = max(these, key=lambda row: row["context"])
            name = str(machine).partition(",")[0].replace("NVIDIA ", "").partition(" 80GB")[0]
            text = f"{longest['step_seconds']:,.0f} s a step" if ran else "not run"
            length = longest["context"]
            groups.setdefault(model, []).append(Bar(name, length, f"{length:,}: {text}", ran))
    title = "The longest sequence of one training step, random weights of each model's shape.\n"
    title += (
        "Filled: the step was run. "
        "Outlined: planned by memory.activation_checkpointing=auto, not run."
    )
    limit = 1.35 * max(row["context"] for row in own)
    return bar_figure(groups, path, title=title, unit="tokens", rows=own, limit=limit)
