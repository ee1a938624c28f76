"""mode=plan of task=masked_language_model: what a run would do, and nothing started."""

from __future__ import annotations

import torch

from flashtrain.data.tokenizers import SpecialTokens
from flashtrain.models.bert import Bert
from flashtrain.settings.settings import Settings
from flashtrain.tasks.components import make_source
from flashtrain.tasks.encoder_batching import memory_plan
from flashtrain.tasks.masked_language.build import bert_config, choose_masked_batching
from flashtrain.tasks.masked_language.prepare import describe_training
from flashtrain.tasks.masked_language.steps import check_masked_step
from flashtrain.tasks.masked_language.weights import read_bert
from flashtrain.tasks.planning import VOCABULARY, duration, expected_rate
from flashtrain.training.hardware import Hardware


def plan_masked(settings: Settings, hardware: Hardware) -> str:
    """Parameters, tokens and time of the run, as lines to print. Builds no weights, reads no text."""
    check_masked_step(settings)
    ordinary = VOCABULARY.get(settings.data.tokenizer, settings.data.vocab_size)
    with torch.device("meta"):
        if settings.weights is None:
            config = bert_config(settings, SpecialTokens.past(ordinary).vocab_size)
        else:
            config = read_bert(settings.weights).config
        model = Bert(config, hardware.attention, settings.bert.residual)
    batching = choose_masked_batching(settings, hardware, model)
    tokens = settings.trainer.steps * settings.trainer.tokens_per_step
    flops = tokens * (config.cost_per_token(settings.masked.share) + config.cost_per_pair() * settings.context)
    rate, how = expected_rate(hardware)
    lines = [
        describe_training(settings, hardware, model, batching),
        f"text: {make_source(settings).describe()}; tokenizer {settings.data.tokenizer}",
        f"tokens: at most {tokens:,} ({settings.trainer.steps} steps of {settings.trainer.tokens_per_step:,})",
        f"time: at most about {duration(flops / (rate * settings.trainer.ranks))} for {flops:.3g} FLOPs, as if all "
        f"samples had {settings.context} tokens ({how}), start-up and validation apart",
        *memory_plan(batching),
        "nothing was started; leave out mode=plan to train.",
    ]
    return "\n".join(lines)
