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
    """Draw the longest sequence of each model on each machine as a bar in a PNG: filled if the step
    was run, outlined if it was only planned; its text then also has the longest that was run.

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
    # One device first, then several.
    machines = sorted(values_of(own, "measured"), key=lambda text: (" x " in text, text)) or [None]
    for model, machine in product(values_of(own, "model"), machines):
        here = [row for row in own if row["model"] == model and row.get("measured") == machine]
        here.sort(key=lambda row: row["context"])
        ran = [f"{row['context']:,} in {row['step_seconds']:,.0f} s"
               for row in here if row.get("step_seconds")]  # fmt: skip
        if here:
            name = str(machine).partition(",")[0].replace("NVIDIA ", "").partition(" 80GB")[0]
            longest, text = here[-1], "".join(ran[-1:]) or "none"
            if not longest.get("step_seconds"):
                limited = " (host memory)" if longest.get("limited_by") == "host" else ""
                text = f"{longest['context']:,} planned{limited}; run: {text}"
            bar = Bar(name, longest["context"], text, bool(longest.get("step_seconds")))
            groups.setdefault(model, []).append(bar)
    title = "The longest sequence of one training step, random weights of each model's shape.\n"
    title += (
        "Filled: the step was run. Outlined: planned (what limits it, if not the GPU's memory)."
    )
    limit = 1.9 * max(row["context"] for row in own)
    return bar_figure(groups, path, title=title, unit="tokens", rows=own, limit=limit)
