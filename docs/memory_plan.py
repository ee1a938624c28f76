"""Compute recipes/results/memory-plan.json: the smallest setting that fits, by
model, context and GPUs.

python docs/memory_plan.py    # some minutes on a CPU; nothing is measured
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.models.trainable import Trainable
from flashtrain.report.rows import write_result
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, fit_memory
from flashtrain.tasks.decoders import make_model
from flashtrain.training.hardware import planned_hardware
from flashtrain.training.memory import GIB

RESULT = Path(__file__).resolve().parents[1] / "recipes" / "results" / "memory-plan.json"
MODELS = ("gpt2-124m", "gpt2-1.3b", "llama-1b", "llama-8b-lora", "llama-8b")
CONTEXTS = (8192, 32768, 131072, 1048576)
MACHINES = (("h100", 1), ("h200", 1), ("h100", 4), ("h100", 8))


def settings_of(model: str, context: int, gpu: str, count: int, strategy: str) -> Settings:
    """One sequence a step on each GPU, or one on all of them under context parallelism."""
    own = ["recipe=hf"]
    if model.startswith("gpt2"):
        own = ["recipe=gpt2", f"model.size={model.removeprefix('gpt2-')}", "model.positions=rotary"]
    tokens = context if strategy == "context_parallel" else context * count
    words = [f"context={context}", f"trainer.tokens_per_step={tokens}", f"trainer.devices={count}"]
    settings = compose_settings(
        [*own, *words, f"trainer.strategy={strategy}", f"hardware.plan_for={gpu}", "mode=plan"]
    )
    if model.startswith("llama"):
        settings.model.config = model.removesuffix("-lora")
        settings.model.adapter = "lora" if model.endswith("-lora") else None
    return settings


@cache
def model_of(model: str, context: int) -> Trainable:
    """The model without weights."""
    settings = settings_of(model, context, "h100", 1, "auto")
    with torch.device("meta"):
        return make_model(settings.model, vocab_size=50257, context=context, attention="flash")


def plans(model: str, context: int, gpu: str, count: int) -> Iterator[tuple[str, Batching]]:
    """The plan of each strategy that the model supports, from simple to complex."""
    for strategy in ("ddp", "fsdp", "context_parallel") if count > 1 else ("auto",):
        settings = settings_of(model, context, gpu, count, strategy)
        try:
            yield (
                strategy,
                fit_memory(settings, planned_hardware(gpu, count), model_of(model, context)),
            )
        except UserError as error:
            print(f"{model} {context} {count} x {gpu} {strategy}: {error}")


def row_of(model: str, context: int, gpu: str, count: int) -> dict[str, Any]:
    """The first plan that fits without host memory, else the first that fits with it."""
    fitting = [
        (strategy, plan) for strategy, plan in plans(model, context, gpu, count) if plan.fits
    ]
    row = {
        "model": model,
        "context": context,
        "gpus": f"{count} x {gpu.upper()}",
        "plan": "does not fit",
    }
    if not fitting:
        return row
    strategy, plan = min(fitting, key=lambda one: one[1].savings.offload)
    estimate, savings = plan.estimate, plan.savings
    kind = (
        "offload" if savings.offload else "chunks" if savings.ffn_chunk else savings.checkpointing
    )
    if savings.layers:
        kind += f" in {savings.layers} of {len(model_of(model, context).shape.layers)}"
    names = kind if strategy == "auto" else f"{strategy}, {kind}"
    host = f" (+ {estimate.host / GIB:.0f} in host memory)" if estimate.host else ""
    return {
        **row,
        "plan": f"{names}: {estimate.total / GIB:.1f}{host}",
        "strategy": strategy,
        "memory": savings.describe() or "none",
        "memory_estimate_gib": round(estimate.total / GIB, 2),
        "host_estimate_gib": round(estimate.host / GIB, 2),
    }


def main() -> None:
    """Compute every row and write the file."""
    rows = [
        row_of(model, context, *machine)
        for model in MODELS
        for context in CONTEXTS
        for machine in MACHINES
    ]
    write_result(RESULT, "memory-plan", "python docs/memory_plan.py", rows, device="computed")


if __name__ == "__main__":
    main()
