"""mode=plan of task=fine_tuning: what a run would do, and nothing started."""

from __future__ import annotations

import torch

from flashtrain.settings.settings import Settings
from flashtrain.tasks.encoder_batching import memory_plan
from flashtrain.tasks.fine_tuning.build import choose_head_batching, encoder_config, make_head, start_of
from flashtrain.tasks.fine_tuning.prepare import describe_training
from flashtrain.tasks.fine_tuning.rows import data_name
from flashtrain.tasks.fine_tuning.steps import check_fine_tuning_step
from flashtrain.tasks.planning import VOCABULARY, duration, expected_rate
from flashtrain.training.hardware import Hardware


def plan_fine_tuning(settings: Settings, hardware: Hardware) -> str:
    """Parameters, texts and time of the run, as lines to print. Builds no weights, reads no text."""
    check_fine_tuning_step(settings)
    start = start_of(settings)
    vocab_size = VOCABULARY.get(settings.data.tokenizer, settings.data.vocab_size) + 4
    with torch.device("meta"):
        config = encoder_config(settings, vocab_size, start)
        model = make_head(settings, hardware, config, max(2, settings.finetune.labels))
    batching = choose_head_batching(settings, hardware, model)
    texts = settings.trainer.steps * settings.finetune.batch
    flops = texts * config.flops([settings.context])
    rate, how = expected_rate(hardware)
    lines = [
        describe_training(settings, hardware, model, batching),
        f"texts: {texts:,} of {data_name(settings)}, cut to {settings.context:,} tokens",
        f"time: at most about {duration(flops / (rate * settings.trainer.ranks))} for {flops:.3g} FLOPs ({how}), "
        "start-up and validation apart",
        *memory_plan(batching),
        "nothing was started; leave out mode=plan to train.",
    ]
    return "\n".join(lines)
