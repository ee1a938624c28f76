"""One training of BERT on labelled texts, made of checked settings."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, cast

import pytorch_lightning as pl
import torch

from flashtrain.data.sequences import SequenceDataModule
from flashtrain.errors import UserError, at_least
from flashtrain.models.bert_classifiers import SequenceClassifier, TokenClassifier
from flashtrain.models.bert_config import BertConfig
from flashtrain.models.bert_encoder import BertEncoder
from flashtrain.settings.settings import Settings, divisors
from flashtrain.spec import TrainedModel, TrainingSetup
from flashtrain.tasks import FineTuning
from flashtrain.tasks.batching import Batching, choose_micro_batch, compiles, memory_words
from flashtrain.tasks.fine_tuning.splits import make_source, train_count
from flashtrain.tasks.masked_language.batching import bert_estimate
from flashtrain.tasks.masked_language.plan import bert_config
from flashtrain.tasks.masked_language.trained import check_context, read_bert, tokenizer_of
from flashtrain.tasks.optimization import optimization_options, set_steps
from flashtrain.tasks.plan_text import memory_plan, plan_text
from flashtrain.tasks.text_data import loader_workers, vocabulary_of
from flashtrain.tasks.training_task import metric
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput

ADVICE = (
    "a smaller finetune.tokens_at_once= or context=, memory.activation_checkpointing=full, "
    "or more trainer.devices"
)
SPECIAL_COUNT = 4  # [PAD], [CLS], [SEP] and [MASK]

Head = SequenceClassifier | TokenClassifier


def check_fine_tuning_step(settings: Settings) -> None:
    """Raise UserError unless the texts of a step divide over devices and micro-batches, and
    their source is named."""
    settings.finetune.check_data()
    at_least("context", settings.context, 3)  # a token and the special ones
    settings.check_share("finetune.batch", settings.finetune.batch)


def prepare(settings: Settings, hardware: Hardware) -> TrainingSetup:
    """Build BERT with a head, its data module and its LightningModule; see Task.prepare."""
    start = starting_bert(settings)
    # In whose tokens the weights know texts.
    tokenizer = None if start is None else tokenizer_of(start)
    source = make_source(settings, tokenizer=tokenizer)
    config = encoder_config(settings, source.special.vocab_size, start)
    model = make_head(settings, hardware, config, len(source.label_names))
    if start is not None:  # their pooler too, if both have one
        model.encoder.load_state_dict(start.model.encoder.state_dict())
        pooler = getattr(model, "pooler", None)
        if pooler is not None and start.model.pooler is not None:
            pooler.load_state_dict(start.model.pooler.state_dict())
    batching = choose_head_batching(settings, hardware, model)
    for block in cast(Any, model.encoder.blocks):
        block.save_memory(batching.savings)
    description = {
        "task": settings.task,
        "name": "bert_classifier",
        "target": settings.finetune.target,
        "shape": {
            **asdict(config),
            "labels": list(source.label_names),
            "pooling": getattr(model, "pooling", None),  # of a head for whole texts
        },
    }
    data = SequenceDataModule(
        source,
        batching.micro_batch,
        total_steps=settings.trainer.steps,
        accumulate=batching.accumulate,
        seed=settings.seed,
        num_workers=loader_workers(settings.data, hardware.kind),
    )
    own = settings.finetune
    epochs = set_steps(settings.trainer, data, own.batch, "Set a smaller finetune.batch.")
    task = FineTuning(
        model,
        own.target,
        compile=compiles(settings, hardware),
        description=description,
        **optimization_options(settings),
    )
    throughput = Throughput(
        config.flops([settings.context]) / settings.context, peak_flops=hardware.peak_flops
    )

    def row(trainer: pl.Trainer) -> dict[str, Any]:
        task: Any = trainer.lightning_module  # a derived task's own, if it has replaced this one
        if task.tokens_done:
            throughput.flops_per_token = task.flops_done / task.tokens_done
        name = task.score_name
        validation = {key: metric(trainer, f"validation_{key}") for key in ("loss", name)}
        if source.scored == "test":
            trainer.test(task, data, verbose=False)
        return {
            "parameters": parameter_count(model),
            "trained_parameters": sum(x.numel() for x in model.parameters() if x.requires_grad),
            "micro_batch": data.batch_size,
            "steps": trainer.global_step,
            "samples": trainer.global_step * own.batch,
            "epochs": round(data.epochs_seen, 3),
            "train_loss_first": task.first_loss,
            "train_loss": task.last_loss,
            **{f"validation_{key}": value for key, value in validation.items()},
            "scored": source.scored,
            name: metric(trainer, f"{source.scored}_{name}"),
            "best_micro_f1": None if source.bound is None else round(source.bound, 4),
            **throughput.columns(),
        }

    return TrainingSetup(
        data,
        task,
        throughput,
        batching,
        description,
        lines=[source.describe(), *epochs, describe_training(settings, hardware, model, batching)],
        row=row,
        tokenizer=source.tokenizer,
        advice=ADVICE,
        monitor=f"validation_{task.score_name}",
        mode="max",
    )


def starting_bert(settings: Settings) -> TrainedModel | None:
    """Read the BERT that `weights` names; None without `weights`.

    Raises:
        UserError: the weights do not suit the settings.
    """
    if settings.weights is None:
        return None
    if settings.finetune.data == "synthetic":
        raise UserError(
            "finetune.data=synthetic makes documents of its own tokens, which no weights know. "
            "Remove weights=, or use finetune.data=files."
        )
    start = read_bert(settings.weights, settings)
    check_context(start.model.config, settings.context, settings.weights)
    return start


def encoder_config(
    settings: Settings, vocab_size: int, start: TrainedModel | None = None
) -> BertConfig:
    """Return the encoder's shape, from the weights to start from or from `bert.*`;
    without pre-training heads."""
    config = bert_config(settings, vocab_size) if start is None else start.model.config
    return replace(
        config, dropout=settings.bert.dropout, masked_head=False, pooler=False, next_sentence=False
    )


def make_head(settings: Settings, hardware: Hardware, config: BertConfig, labels: int) -> Head:
    """Build an encoder with a head for `labels` labels, with random weights."""
    own = settings.finetune
    if own.frozen:
        config = replace(config, dropout=0.0)
    encoder = BertEncoder(config, hardware.attention).requires_grad_(not own.frozen)
    if own.target == "tokens":
        return TokenClassifier(encoder, labels, dropout=own.dropout)
    given: Any = {"multi_label": own.target == "labels", "dropout": own.dropout}
    return SequenceClassifier(encoder, labels, pooling=own.pooling, queries=own.queries, **given)


def choose_head_batching(settings: Settings, hardware: Hardware, model: Head) -> Batching:
    """Choose the number of texts in a micro-batch, and the memory savings.

    The number is trainer.micro_batch, or as many as finetune.tokens_at_once and
    the device's memory hold.
    """
    share = settings.finetune.batch // settings.trainer.ranks
    most = max(1, settings.finetune.tokens_at_once // settings.context)
    config, parameters = model.encoder.config, parameter_count(model)
    estimate = bert_estimate(settings, hardware, config, parameters, "packed", settings.context)
    sizes = settings.trainer.micro_batch or [size for size in divisors(share) if size <= most]
    return choose_micro_batch(settings, hardware, sizes, share, estimate)


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def plan_fine_tuning(settings: Settings, hardware: Hardware) -> str:
    """Return mode=plan's text: parameters, texts, estimated memory and time. Builds no
    weights; reads local files to count their texts."""
    own = settings.finetune
    config = encoder_config(
        settings, vocabulary_of(settings.data) + SPECIAL_COUNT, starting_bert(settings)
    )
    with torch.device("meta"):
        model = make_head(settings, hardware, config, max(2, own.labels))
    batching = choose_head_batching(settings, hardware, model)
    texts, read = settings.trainer.steps * own.batch, "are read"
    if own.data == "files":
        read = f"are read in {texts / (count := train_count(own)):.1f} epochs of {count:,}"
    lines = [
        describe_training(settings, hardware, model, batching),
        f"texts: {texts:,} {read} of {own.data_label}, cut to {settings.context:,} tokens",
        *memory_plan(
            settings,
            hardware,
            batching,
            lambda changed: choose_head_batching(changed, hardware, model),
        ),
    ]
    flops = texts * config.flops([settings.context]) / (3 if own.frozen else 1)  # no backward
    return plan_text(lines, settings, hardware, flops, at_most=True)


def describe_training(
    settings: Settings, hardware: Hardware, model: Head, batching: Batching
) -> str:
    """Return the line that announces a training: model, context, steps,
    machine, micro-batch, memory."""
    own = settings.finetune
    start = "" if settings.weights is None else " (trained weights, new head)"
    return (
        f"{settings.named(settings.bert.label)}{start}: {parameter_count(model) / 1e6:.2f}M "
        f"parameters, context {settings.context:,}, attention {hardware.attention}; "
        f"{settings.trainer.steps} steps of {own.batch} texts on {settings.trainer.ranks} x "
        f"{hardware.name}, {hardware.precision}, micro-batch "
        f"{batching.micro_batch}{memory_words(batching)}"
    )
