"""mode=plan: what a run would do, and nothing started."""

from __future__ import annotations

import time

import torch

from flashtrain.models.gpt2 import GPT2
from flashtrain.run.batching import Batching, choose_batching
from flashtrain.run.components import make_model, make_source
from flashtrain.run.context_run import check_model, plan_lines
from flashtrain.run.run import describe
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware

# The part of the device's rate that a compiled training step reaches: on an H200 about 0.4 of the dense peak for
# GPT-2 124M (recipes/results/gpt2-h200.json); on a CPU, half of what one large matrix product does is a careful guess.
GPU_EFFICIENCY = 0.4
CPU_EFFICIENCY = 0.5
VOCABULARY = {"bytes": 257, "gpt2": 50257}


def plan(settings: Settings, hardware: Hardware) -> str:
    """Parameters, tokens, estimated memory and time of the run, as lines to print. Builds no weights, reads no text."""
    with torch.device("meta"):
        vocab_size = VOCABULARY.get(settings.data.tokenizer, settings.data.vocab_size)
        model = make_model(settings, vocab_size=vocab_size, attention=hardware.attention)
    check_model(settings, model)
    batching = choose_batching(settings, hardware, model)
    tokens = settings.trainer.steps * settings.trainer.tokens_per_step
    flops = tokens * model.flops_per_token(settings.context)
    rate, how = expected_rate(hardware)
    wanted = duration(flops / (rate * settings.trainer.ranks))
    lines = [
        describe(settings, hardware, model, batching),
        f"text: {make_source(settings).describe()}; tokenizer {settings.data.tokenizer}",
        f"tokens: {tokens:,} ({settings.trainer.steps} steps of {settings.trainer.tokens_per_step:,})",
        *(plan_lines(settings, hardware, model.config, batching.micro_batch) if isinstance(model, GPT2) else []),
        *(batching.estimate.lines() if batching.estimate else []),
        *_ways_to_run(batching),
        f"time: about {wanted} for {flops:.3g} FLOPs ({how}), start-up and validation apart",
        "nothing was started; leave out mode=plan to train.",
    ]
    return "\n".join(lines)


def _ways_to_run(batching: Batching) -> list[str]:
    """The estimate of every kind of memory saving, the one that would be taken marked."""
    if not batching.options:
        return []
    lines = [f"{'>' if option.savings == batching.savings else ' '} {option.line()}" for option in batching.options]
    return ["memory savings, cheapest in time first (> is taken):", *lines]


def expected_rate(hardware: Hardware) -> tuple[float, str]:
    """FLOP/s that a training step may be expected to reach on one device, and where the figure comes from."""
    if hardware.peak_flops is not None:
        return GPU_EFFICIENCY * hardware.peak_flops, f"at {GPU_EFFICIENCY:.0%} of the device's peak"
    device, dtype = hardware.kind, torch.float32 if hardware.kind == "cpu" else torch.float16
    size = 1024 if hardware.kind == "cpu" else 8192
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])
    began, repeats = time.perf_counter(), 3
    for _ in range(repeats):
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
    rate = repeats * 2 * size**3 / (time.perf_counter() - began)
    return CPU_EFFICIENCY * rate, f"at {CPU_EFFICIENCY:.0%} of a matrix product's rate measured now"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
