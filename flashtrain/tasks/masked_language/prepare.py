"""One training of BERT on masked text, made of checked settings."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytorch_lightning as pl

from flashtrain.data.balance import Cost
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.errors import UserError
from flashtrain.models.bert import Bert
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainingSetup
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.batching import compiles
from flashtrain.tasks.masked_language.batching import choose_masked_batching, tokens_per_device
from flashtrain.tasks.masked_language.plan import bert_config, describe_training
from flashtrain.tasks.masked_language.trained import check_context, read_bert
from flashtrain.tasks.optimization import optimization_options, set_steps
from flashtrain.tasks.plan_text import slow_steps
from flashtrain.tasks.text_data import (
    loader_workers,
    make_sources,
    make_tokenizer_spec,
    reading_options,
)
from flashtrain.tasks.training_task import metric
from flashtrain.training.early_stopping import StopAtTarget
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput
from flashtrain.training.validation import describe_validation

ADVICE = (
    "a smaller masked.token_budget=, memory.activation_checkpointing=full, "
    "or trainer.devices on more GPUs"
)
MAX_VALIDATION_SAMPLES = 10_000  # of each validation, where masked.validation_samples is null


def prepare(settings: Settings, hardware: Hardware) -> TrainingSetup:
    """Build BERT, its data module and its LightningModule; see Task.prepare."""
    data = make_masked_data(settings, hardware)
    data.prepare_data()
    data.setup()
    model = make_bert(settings, hardware, data.vocab_size)
    batching = choose_masked_batching(settings, hardware, model, data.padding())
    data.token_budget, data.accumulate = batching.micro_batch, batching.accumulate
    model.save_memory(batching.savings)
    description = {
        "task": settings.task,
        "name": "bert",
        "size": settings.bert.size,
        "vocab_size": model.config.vocab_size,
        "shape": asdict(model.config),
    }
    rows, advice = batching.accumulate * settings.trainer.ranks, "Use smaller steps."
    epochs = set_steps(settings.trainer, data, rows, advice)
    lines = [data.describe(), *epochs, describe_training(settings, hardware, model, batching, data)]
    if data.held_out_samples:
        requested, every = settings.masked.validation_samples, settings.trainer.validate_every
        lines.append(
            describe_validation(
                data.held_out_samples, requested, every, "masked.validation_samples"
            )
        )
    task = make_masked_task(settings, hardware, model, description)
    # Of forward and backward for each token that is not padding, as a mean over the text.
    flops = model.config.flops_of(1, *data.means())
    lines += slow_steps(settings, hardware, flops * settings.trainer.tokens_per_step)
    throughput = Throughput(flops, peak_flops=hardware.peak_flops)
    target = None if settings.target_accuracy is None else StopAtTarget(settings.target_accuracy)

    def row(trainer: pl.Trainer) -> dict[str, Any]:
        task: Any = trainer.lightning_module  # a derived task's own, if it has replaced this one
        # Losses in nats a label; tokens are real ones, without padding.
        if task.tokens_done:
            throughput.flops_per_token = task.flops_done / task.tokens_done
        measured = throughput.columns()
        rate, tokens = measured["tokens_per_second"], task.tokens_done * settings.trainer.ranks
        return {
            "token_budget": data.token_budget,
            "parameters": model.parameter_count(),
            "steps": trainer.global_step,
            "tokens": tokens,
            "samples": task.sequences_done * settings.trainer.ranks,
            "epochs": round(data.epochs_seen, 3),
            "train_loss_first": task.first_loss,
            "train_loss": task.last_loss,
            "validation_loss": metric(trainer, "validation_loss"),
            "validation_accuracy": metric(trainer, "validation_accuracy"),
            "target_accuracy": settings.target_accuracy,
            "seconds_to_target": None
            if target is None or target.seconds is None
            else round(target.seconds, 1),
            "rows_per_second": None
            if rate is None
            else rate * task.sequences_done / task.tokens_done,
            "fill": round(
                tokens / max(1, trainer.global_step * settings.trainer.tokens_per_step), 4
            ),
            **measured,
        }

    return TrainingSetup(
        data,
        task,
        throughput,
        batching,
        description,
        lines,
        row,
        tokenizer=data.tokenizer,
        advice=ADVICE,
        callbacks=[] if target is None else [target],
    )


def make_masked_data(settings: Settings, hardware: Hardware) -> MaskedTextDataModule:
    """Build the data module. Its token_budget and accumulate are set later,
    once the model is known.

    Raises:
        UserError: data.streaming is true, or the source has no text.
    """
    masked, data, trainer = settings.masked, settings.data, settings.trainer
    if data.streaming:
        raise UserError(
            "data.streaming=true supports language models only. Use data.streaming=false."
        )
    source, validation = make_sources(data)
    budget = masked.token_budget or max(settings.context, tokens_per_device(settings))
    # Any: the vocabulary adds to the cost of each token alike.
    config = bert_config(settings, vocab_size=30522)
    step = trainer.tokens_per_step // settings.context  # samples, at least: most are shorter
    return MaskedTextDataModule(
        source,
        make_tokenizer_spec(data),
        settings.context,
        budget,
        unit=masked.sample_unit,
        share=masked.mlm_probability,
        layout=masked.layout,
        cost=Cost(config.cost_per_token(masked.mlm_probability), config.cost_per_pair()),
        accumulate=max(1, tokens_per_device(settings) // budget),
        validation=validation,
        seed=settings.seed,
        num_workers=loader_workers(data, hardware.kind),
        **reading_options(
            data,
            trainer,
            requested=masked.validation_samples,
            step=step,
            most=MAX_VALIDATION_SAMPLES,
        ),
    )


def make_bert(settings: Settings, hardware: Hardware, vocab_size: int) -> Bert:
    """Build the model to train, with random weights or those that `weights` names.

    Raises:
        UserError: the weights have another vocabulary or a shorter context.
        KeyError: the weights have no masked-language head.
    """
    if settings.weights is None:
        return Bert(bert_config(settings, vocab_size), hardware.attention)
    start = read_bert(settings.weights, settings).model
    # The next-sentence head and its pooler are left out: the samples are single pieces.
    config = replace(
        start.config,
        dropout=settings.bert.dropout,
        masked_head=True,
        pooler=False,
        next_sentence=False,
    )
    if config.vocab_size != vocab_size:
        raise UserError(
            f"the weights in {settings.weights} know {config.vocab_size} tokens, and "
            f"this text is made of {vocab_size}. Use the data and tokenizer settings "
            "that they were trained with."
        )
    check_context(config, settings.context, settings.weights)
    model, state = Bert(config, hardware.attention), start.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model


def make_masked_task(
    settings: Settings, hardware: Hardware, model: Bert, description: dict[str, Any]
) -> MaskedLanguageModel:
    """Build the LightningModule that trains this model as the settings say."""
    return MaskedLanguageModel(
        model,
        cuda_graphs=settings.trainer.cuda_graphs,
        compile=compiles(settings, hardware, settings.masked.layout),
        description=description,
        **optimization_options(settings),
    )
