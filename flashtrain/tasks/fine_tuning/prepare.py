"""What one fine-tuning of BERT takes, from checked settings: a labelled source, BERT with a head, task and plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.data.sequences import SequenceDataModule
from flashtrain.errors import UserError, at_least
from flashtrain.models.bert import Bert
from flashtrain.models.bert_classifiers import SequenceClassifier, TokenClassifier
from flashtrain.models.bert_config import BertConfig
from flashtrain.models.bert_encoder import BertEncoder
from flashtrain.settings.settings import Settings, divisors
from flashtrain.spec import TrainingSetup
from flashtrain.tasks import FineTuning
from flashtrain.tasks.batching import Batching, choose_micro_batch, compiles, memory_plan, memory_words, plan_text
from flashtrain.tasks.components import loader_workers, optimizer_builder, schedule_builder, vocabulary_of
from flashtrain.tasks.fine_tuning.splits import LabelledSource, make_source
from flashtrain.tasks.masked_language.build import SavedBert, bert_config, bert_estimate, check_context, read_bert
from flashtrain.tasks.training_task import metric
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput


def texts_per_device(settings: Settings) -> int:
    """Texts of an optimiser step on one device."""
    return settings.finetune.batch // settings.trainer.ranks


def micro_batches(settings: Settings) -> int | list[int]:
    """Texts that a device may compute at once: as requested, or those that finetune.tokens_at_once holds, ascending."""
    if settings.trainer.micro_batch is not None:
        return settings.trainer.micro_batch
    most = max(1, settings.finetune.tokens_at_once // settings.context)
    return [size for size in divisors(texts_per_device(settings)) if size <= most]


def check_fine_tuning_step(settings: Settings) -> None:
    """Raise UserError unless the texts of a step divide over devices and micro-batches, and their source is named."""
    settings.finetune.check_data()
    at_least("context", settings.context, 3)  # a token and the special ones
    batch, ranks, micro = settings.finetune.batch, settings.trainer.ranks, settings.trainer.micro_batch
    if batch % ranks:
        raise UserError(
            f"a step of finetune.batch={batch} texts does not divide over {ranks} devices. Use a multiple of {ranks}."
        )
    if micro is not None and (batch // ranks) % micro:
        raise UserError(
            f"trainer.micro_batch={micro} does not divide the {batch // ranks} texts a device takes a step. "
            f"Expected one of {', '.join(map(str, divisors(batch // ranks)))}."
        )


TASK = "fine_tuning"
Head = SequenceClassifier | TokenClassifier


def start_of(settings: Settings) -> SavedBert | None:
    """The BERT that `weights` names; None for random weights. UserError: weights that cannot serve the settings."""
    if settings.weights is None:
        return None
    if settings.finetune.data == "cues":
        raise UserError(
            "finetune.data=cues makes documents of its own tokens, which no weights know. Remove weights=, or use "
            "finetune.data=files."
        )
    saved = read_bert(settings.weights)
    check_context(saved.config, settings.context, settings.weights)
    return saved


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
    return choose_micro_batch(settings, hardware, micro_batches(settings), texts_per_device(settings), estimate)


def make_labelled_data(
    settings: Settings, hardware: Hardware, source: LabelledSource, batching: Batching
) -> SequenceDataModule:
    """The data module of these settings."""
    return SequenceDataModule(
        source,
        batching.micro_batch,
        total_steps=settings.trainer.steps,
        accumulate=batching.accumulate,
        seed=settings.seed,
        num_workers=loader_workers(settings.data.workers, hardware),
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
    pooling = getattr(model, "pooling", None)  # of a head for whole texts
    return {
        "task": TASK,
        "name": "bert_classifier",
        "target": settings.finetune.target,
        "shape": {**asdict(model.encoder.config), "labels": list(source.label_names), "pooling": pooling},
    }


def parameter_count(model: torch.nn.Module) -> int:
    """Parameters, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


ADVICE = "a smaller finetune.tokens_at_once= or context=, memory=full, or trainer.devices on more GPUs"


def prepare(settings: Settings, hardware: Hardware) -> TrainingSetup:
    """BERT with a head, its data and its task. UserError: for what the user can mend."""
    check_fine_tuning_step(settings)
    start = start_of(settings)
    tokenizer = None if start is None else start.needed_tokenizer()  # in whose tokens the weights know texts
    source = make_source(settings.finetune, settings.data, settings.context, tokenizer=tokenizer)
    model = make_model(settings, hardware, source, start)
    batching = choose_head_batching(settings, hardware, model)
    model.encoder.save_memory(batching.savings)
    description = describe_head(model, settings, source)
    data = make_labelled_data(settings, hardware, source, batching)
    task = make_fine_tuning_task(settings, hardware, model, description)
    config = model.encoder.config
    throughput = Throughput(config.flops([settings.context]) / settings.context, peak_flops=hardware.peak_flops)
    return TrainingSetup(
        data,
        task,
        throughput,
        batching,
        description,
        said=[source.describe(), describe_training(settings, hardware, model, batching)],
        row=lambda trainer: _found(trainer, task, data, source, throughput),
        tokenizer=source.tokenizer,
        advice=ADVICE,
        monitor=f"validation_{task.score_name}",
        mode="max",
    )


def describe_training(settings: Settings, hardware: Hardware, model: Head, batching: Batching) -> str:
    """The line that says what is about to be trained, on what, in what portions."""
    asked, name = settings.finetune, settings.named(settings.bert.label)
    start = "" if settings.weights is None else " (trained weights, new head)"
    return (
        f"{name}{start}: {parameter_count(model) / 1e6:.2f}M parameters, context {settings.context:,}, "
        f"{asked.layout}, attention {hardware.attention}; {settings.trainer.steps} steps of {asked.batch} texts on "
        f"{settings.trainer.ranks} x {hardware.name}, {hardware.precision}, micro-batch {batching.micro_batch}"
        f"{memory_words(batching)}"
    )


def _found(
    trainer: pl.Trainer,
    task: FineTuning,
    data: SequenceDataModule,
    source: LabelledSource,
    throughput: Throughput,
) -> dict[str, Any]:
    """The part of the row that the training told, and the score of the weights at its end."""
    if task.tokens_done:
        throughput.flops_per_token = task.flops_done / task.tokens_done
    name = task.score_name
    validation = {key: metric(trainer, f"validation_{key}") for key in ("loss", name)}
    if source.scored == "test":
        trainer.test(task, data, verbose=False)
    score = metric(trainer, f"{source.scored}_{name}")
    return {
        "parameters": parameter_count(task.model),
        "micro_batch": data.batch_size,
        "epochs": round(data.epochs_seen, 3),
        "train_loss_first": task.first_loss,
        "train_loss": task.last_loss,
        **{f"validation_{key}": value for key, value in validation.items()},
        "scored": source.scored,
        name: score,
        "best_micro_f1": None if source.bound is None else round(source.bound, 4),
        **throughput.columns(),
    }


def plan_fine_tuning(settings: Settings, hardware: Hardware) -> str:
    """Parameters, texts and time of the run, as lines to print. Builds no weights, reads no text."""
    check_fine_tuning_step(settings)
    start = start_of(settings)
    vocab_size = vocabulary_of(settings.data) + 4
    with torch.device("meta"):
        config = encoder_config(settings, vocab_size, start)
        model = make_head(settings, hardware, config, max(2, settings.finetune.labels))
    batching = choose_head_batching(settings, hardware, model)
    texts = settings.trainer.steps * settings.finetune.batch
    flops = texts * config.flops([settings.context])
    lines = [
        describe_training(settings, hardware, model, batching),
        f"texts: {texts:,} of {settings.finetune.data_label}, cut to {settings.context:,} tokens",
        *memory_plan(batching),
    ]
    return plan_text(lines, settings, hardware, flops, at_most=True)
