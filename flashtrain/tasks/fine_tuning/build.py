"""From settings to a labelled source, BERT with a head, and their task: where the settings of fine-tuning end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from flashtrain.data.sequences import SequenceDataModule
from flashtrain.errors import UserError
from flashtrain.models.bert import Bert
from flashtrain.models.bert_classifiers import SequenceClassifier, TokenClassifier
from flashtrain.models.bert_encoder import BertConfig, BertEncoder
from flashtrain.settings.settings import Settings
from flashtrain.tasks import FineTuning
from flashtrain.tasks.batching import Batching, compiles
from flashtrain.tasks.components import optimizer_builder, schedule_builder
from flashtrain.tasks.encoder_batching import choose_encoder_batching
from flashtrain.tasks.fine_tuning.splits import LabelledSource, make_source
from flashtrain.tasks.fine_tuning.steps import micro_batches, texts_per_device
from flashtrain.tasks.masked_language.build import bert_config, check_context
from flashtrain.tasks.masked_language.memory import bert_estimate
from flashtrain.tasks.masked_language.weights import SavedBert, read_bert
from flashtrain.training.hardware import Hardware

TASK = "fine_tuning"
Head = SequenceClassifier | TokenClassifier


def start_of(settings: Settings) -> SavedBert | None:
    """The BERT that `weights` names; None for random weights. UserError: weights that cannot serve the settings."""
    if settings.weights is None:
        return None
    if settings.finetune.data == "cues":
        raise UserError(
            "made-up documents (finetune.data=cues) have tokens of their own, which no weights know: leave weights= "
            "out, or take finetune.data=files."
        )
    saved = read_bert(settings.weights)
    check_context(saved.config, settings.context, settings.weights)
    return saved


def make_labelled_source(
    settings: Settings, start: SavedBert | None, label_names: Sequence[str] | None = None
) -> LabelledSource:
    """The texts of these settings, in the tokens of the weights to start from."""
    tokenizer = None if start is None else start.needed_tokenizer()
    return make_source(settings.finetune, settings.data, settings.context, tokenizer=tokenizer, label_names=label_names)


def encoder_config(settings: Settings, vocab_size: int, start: SavedBert | None = None) -> BertConfig:
    """The encoder's shape: that of the weights to start from, or what `bert.*` names; without BERT's own heads."""
    config = bert_config(settings, vocab_size) if start is None else start.config
    return replace(config, dropout=settings.bert.dropout, masked_head=False, pooler=False, next_sentence=False)


def make_head(settings: Settings, hardware: Hardware, config: BertConfig, labels: int) -> Head:
    """An encoder and a head for so many labels, with random weights."""
    asked = settings.finetune
    encoder = BertEncoder(config, hardware.attention, settings.bert.residual)
    if asked.target == "tokens":
        return TokenClassifier(encoder, labels, dropout=asked.dropout)
    several = asked.target == "labels"
    return SequenceClassifier(encoder, labels, multi_label=several, pooling=asked.pooling, dropout=asked.dropout)


def make_model(settings: Settings, hardware: Hardware, source: LabelledSource, start: SavedBert | None) -> Head:
    """The model to train: a new head, on a new encoder or that of the weights (with their pooler, if any)."""
    config = encoder_config(settings, source.special.vocab_size, start)
    model = make_head(settings, hardware, config, len(source.label_names))
    if start is not None:
        trained = Bert(start.config, "sdpa")
        trained.load_state_dict(start.state)
        model.encoder.load_state_dict(trained.encoder.state_dict())
        pooler = getattr(model, "pooler", None)
        if pooler is not None and trained.pooler is not None:
            pooler.load_state_dict(trained.pooler.state_dict())
    return model


def choose_head_batching(settings: Settings, hardware: Hardware, model: Head) -> Batching:
    """The texts of a micro-batch, and the memory savings."""
    config, parameters = model.encoder.config, parameter_count(model)
    estimate = bert_estimate(
        settings, hardware, config, parameters, layout=settings.finetune.layout, tokens_each=settings.context
    )
    return choose_encoder_batching(settings, hardware, micro_batches(settings), texts_per_device(settings), estimate)


def make_labelled_data(
    settings: Settings, hardware: Hardware, source: LabelledSource, batching: Batching
) -> SequenceDataModule:
    """The data module of these settings."""
    workers = settings.data.workers
    return SequenceDataModule(
        source,
        batching.micro_batch,
        total_steps=settings.trainer.steps,
        accumulate=batching.accumulate,
        seed=settings.seed,
        num_workers=(2 if hardware.kind == "cuda" else 0) if workers is None else workers,
    )


def make_fine_tuning_task(
    settings: Settings, hardware: Hardware, model: Head, description: dict[str, Any] | None = None
) -> FineTuning:
    """The task that trains this model."""
    return FineTuning(
        model,
        settings.finetune.target,
        make_optimizer=optimizer_builder(settings),
        make_schedule=schedule_builder(settings),
        gradient_clip=settings.optimizer.gradient_clip,
        compile=compiles(settings, hardware, settings.finetune.layout),
        description=description,
    )


def describe_head(model: Head, settings: Settings, source: LabelledSource) -> dict[str, Any]:
    """What a checkpoint says of its model, in plain values."""
    return {
        "task": TASK,
        "name": "bert_classifier",
        "target": settings.finetune.target,
        "shape": {**asdict(model.encoder.config), "labels": list(source.label_names), "pooling": _pooling(model)},
    }


def parameter_count(model: torch.nn.Module) -> int:
    """Parameters, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _pooling(model: Head) -> str | None:
    return model.pooling if isinstance(model, SequenceClassifier) else None
