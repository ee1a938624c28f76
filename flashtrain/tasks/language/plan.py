"""mode=plan of a language model: what a run would do, and nothing started."""

from __future__ import annotations

import torch

from flashtrain.models.gpt2 import GPT2
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, choose_batching
from flashtrain.tasks.components import make_model, make_source
from flashtrain.tasks.context_run import check_model, plan_lines
from flashtrain.tasks.language.prepare import describe
from flashtrain.tasks.planning import VOCABULARY, duration, expected_rate
from flashtrain.training.hardware import Hardware


def plan_language(settings: Settings, hardware: Hardware) -> str:
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
