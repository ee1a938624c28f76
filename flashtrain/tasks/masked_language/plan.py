"""The texts that announce a training of BERT on masked text, or plan it (mode=plan)."""

from __future__ import annotations

import torch

from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, memory_words
from flashtrain.tasks.masked_language.batching import choose_masked_batching
from flashtrain.tasks.masked_language.trained import read_bert
from flashtrain.tasks.plan_text import memory_plan, plan_text
from flashtrain.tasks.text_data import make_source, vocabulary_of
from flashtrain.training.hardware import Hardware


def bert_config(settings: Settings, vocab_size: int) -> BertConfig:
    """Return the shape of the model that `bert.*` names; vocab_size includes the special tokens."""
    bert = settings.bert
    own = {name: getattr(bert, name) for name in ("vocab_rows", "dropout", "activation")}
    return BertConfig.of_size(
        bert.size, bert.family, vocab_size=vocab_size, context=settings.context, **own
    )


def plan_masked(settings: Settings, hardware: Hardware) -> str:
    """Return mode=plan's text: parameters, tokens, estimated memory and time. Builds no
    weights, reads no text."""
    if settings.weights is None:
        config = bert_config(settings, SpecialTokens.past(vocabulary_of(settings.data)).vocab_size)
    else:
        config = read_bert(settings.weights, settings).model.config
    with torch.device("meta"):
        model = Bert(config, hardware.attention)
    batching = choose_masked_batching(settings, hardware, model)
    tokens = settings.trainer.steps * settings.trainer.tokens_per_step
    share = settings.masked.mlm_probability
    flops = tokens * (config.cost_per_token(share) + config.cost_per_pair() * settings.context)
    lines = [
        describe_training(settings, hardware, model, batching),
        f"text: {make_source(settings.data).describe()}; tokenizer {settings.data.tokenizer}",
        (
            f"tokens: at most {tokens:,} ({settings.trainer.steps} steps of "
            f"{settings.trainer.tokens_per_step:,})"
        ),
        *memory_plan(
            settings,
            hardware,
            batching,
            lambda changed: choose_masked_batching(changed, hardware, model),
        ),
    ]
    how = f", as if all samples had {settings.context} tokens"
    return plan_text(lines, settings, hardware, flops, at_most=True, how=how)


def describe_training(
    settings: Settings,
    hardware: Hardware,
    model: Bert,
    batching: Batching,
    data: MaskedTextDataModule | None = None,
) -> str:
    """Return the line that announces a training: model, samples, steps,
    machine, micro-batch, memory."""
    masked, samples = settings.masked, ""
    if data is not None:
        pieces = data.pieces(data.split.training)
        mean = float(pieces.lengths.mean())
        samples = f"{len(pieces.begins):,} {masked.sample_unit}s of {mean:.0f} tokens in the mean, "
    return (
        f"{settings.named(settings.bert.label)}: {model.parameter_count() / 1e6:.1f}M parameters, "
        f"{samples}at most {settings.context}, {masked.mlm_probability:.0%} masked, "
        f"{masked.layout}, attention {hardware.attention}; {settings.trainer.steps} steps of "
        f"{settings.trainer.tokens_per_step:,} tokens on {settings.trainer.ranks} x "
        f"{hardware.name}, {hardware.precision}, micro-batch {batching.micro_batch:,} tokens"
        f"{memory_words(batching)}"
    )
