"""What one fine-tuning of BERT takes: model, data and task of checked settings; and what came out of it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from flashtrain.data.sequences import SequenceDataModule
from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared
from flashtrain.tasks import FineTuning
from flashtrain.tasks.batching import Batching
from flashtrain.tasks.encoder_batching import memory_words
from flashtrain.tasks.fine_tuning.build import (
    Head,
    choose_head_batching,
    describe_head,
    make_fine_tuning_task,
    make_labelled_data,
    make_labelled_source,
    make_model,
    parameter_count,
    start_of,
)
from flashtrain.tasks.fine_tuning.splits import LabelledSource
from flashtrain.tasks.fine_tuning.steps import check_fine_tuning_step
from flashtrain.tasks.masked_language.rows import bert_name
from flashtrain.tasks.training_task import metric
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput

ADVICE = "a smaller finetune.tokens_at_once= or context=, memory=full, or trainer.devices on more GPUs"


def prepare(settings: Settings, hardware: Hardware) -> Prepared:
    """BERT with a head, its data and its task. UserError: for what the user can mend."""
    check_fine_tuning_step(settings)
    start = start_of(settings)
    source = make_labelled_source(settings, start)
    model = make_model(settings, hardware, source, start)
    batching = choose_head_batching(settings, hardware, model)
    model.encoder.save_memory(batching.savings)
    description = describe_head(model, settings, source)
    data = make_labelled_data(settings, hardware, source, batching)
    task = make_fine_tuning_task(settings, hardware, model, description)
    config = model.encoder.config
    throughput = Throughput(config.flops([settings.context]) / settings.context, peak_flops=hardware.peak_flops)
    return Prepared(
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
    asked = settings.finetune
    start = "" if settings.weights is None else " (trained weights, new head)"
    return (
        f"{bert_name(settings)}{start}: {parameter_count(model) / 1e6:.2f}M parameters, context {settings.context:,}, "
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
    measured = throughput.summary()
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
        "tokens_per_second": measured["tokens_per_second"],
        "step_seconds": measured["step_seconds_median"],
        "mfu": measured["mfu"],
        "peak_memory_gib": measured["peak_memory_gib"],
    }
