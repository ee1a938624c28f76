"""One training of a language model, made of checked settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import SAMPLE
from flashtrain.models.decoder_config import FAMILIES
from flashtrain.models.trainable import Trainable
from flashtrain.registry import component
from flashtrain.settings.data import DataSettings
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainingSetup
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.attention_masks import attended_context, make_mask
from flashtrain.tasks.batching import compiles, fit_memory
from flashtrain.tasks.context_run import check_shape, context_columns
from flashtrain.tasks.decoders import decoder_config, make_model
from flashtrain.tasks.language.exports import take_export
from flashtrain.tasks.language.generate import continue_text
from flashtrain.tasks.language.plan import describe, describe_mask, describe_unknown, many
from flashtrain.tasks.language.starting_weights import (
    check_tokens,
    model_of_weights,
    tokenizer_of_weights,
    weights_at_context,
)
from flashtrain.tasks.optimization import optimization_options, set_steps
from flashtrain.tasks.plan_text import slow_steps
from flashtrain.tasks.text_data import (
    loader_workers,
    make_sources,
    make_tokenizer_spec,
    reading_options,
    vocabulary_of,
)
from flashtrain.tasks.training_task import metric
from flashtrain.training.float8 import check_float8, float8_flops
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput
from flashtrain.training.validation import describe_validation

MakeTask = Callable[..., LanguageModel]
MAX_VALIDATION_TOKENS = 524_288  # of each validation, where data.validation_tokens is null


def prepare(
    settings: Settings, hardware: Hardware, make_task: MakeTask = LanguageModel
) -> TrainingSetup:
    """Build a language model, its data module and its LightningModule; see Task.prepare.

    Args:
        make_task: makes the LightningModule: a class derived from LanguageModel, or a function that
            takes its arguments.
    """
    check_float8(settings.model.float8, hardware, plans=False)
    take_export(settings)
    build_model = model_builder(settings)
    data, epochs = read_data(settings, hardware)
    vocab_size = data.tokenizer.vocab_size
    model = build_model(vocab_size=vocab_size, attention=hardware.attention)
    batching = fit_memory(settings, hardware, model)
    data.batch_size, data.accumulate = batching.micro_batch, batching.accumulate
    description = describe_model(model, settings, vocab_size=vocab_size)
    lines = [data.describe(), *epochs, describe(settings, hardware, model, batching)]
    lines += [*describe_mask(settings, read=True), *describe_unknown(model)]
    parts = data.epochs_of_parts(settings.trainer.steps * settings.samples_per_step)
    lines += [parts] if parts else []
    read = settings.trainer.steps * settings.trainer.tokens_per_step
    if not parts and not epochs and 0 < data.train_tokens < 0.95 * read:
        passes = read / data.train_tokens
        lines.append(f"{read:,} tokens are read: {passes:.1f} epochs of this text{many(passes)}")
    if data.validation_tokens:
        requested, every = settings.data.validation_tokens, settings.trainer.validate_every
        lines.append(
            describe_validation(data.held_out_samples, requested, every, "data.validation_tokens")
        )
    task = language_model(settings, hardware, model, description, make_task)
    row_length = attended_context(settings.applied_mask, settings.context)
    flops = model.flops_per_token(row_length) * settings.trainer.tokens_per_step
    lines += slow_steps(settings, hardware, flops)
    throughput = Throughput(
        # Of packed documents only their own tokens' pairs are computed.
        lambda: model.flops_per_token(getattr(setup.task, "mean_length", None) or row_length),
        settings.trainer.tokens_per_step,
        peak_flops=hardware.peak_flops,
        float8_flops=float8_flops(model, settings.model.float8)[0],
    )

    def row(trainer: pl.Trainer) -> dict[str, Any]:
        task: Any = trainer.lightning_module  # a derived task's own, if it has replaced this one
        # Losses in nats a token, memory in GiB, time in seconds.
        found = {
            "parameters": model.parameter_count(),
            "micro_batch": batching.micro_batch,
            "steps": trainer.global_step,
            "tokens": trainer.global_step * settings.trainer.tokens_per_step,
            "epochs": round(data.epochs_seen, 3),
            "train_loss_first": task.first_loss,
            "train_loss": task.last_loss,
            "validation_loss": metric(trainer, "validation_loss"),
            **throughput.columns(),
            **context_columns(settings.sharding, hardware.precision, model, batching.micro_batch),
        }
        _say_sample(settings, hardware, model, data, trainer)
        return found

    setup = TrainingSetup(
        data, task, throughput, batching, description, lines, row, tokenizer=data.tokenizer
    )
    return setup


def read_data(settings: Settings, hardware: Hardware) -> tuple[TextDataModule, list[str]]:
    """Return the data module, its data read, and a list with the line on trainer.epochs, which
    gives the steps; [] without."""
    own = tokenizer_of_weights(settings.weights, begin_of_text=settings.data.begin_of_text)
    data = make_data(settings, hardware, own)
    data.prepare_data()
    data.setup()
    tokens, rows = (settings.trainer.epochs or 0) * data.train_tokens / 10, settings.context
    whole = tokens // rows * rows or tokens  # a step is whole rows
    advice = f"For ten set trainer.tokens_per_step to about {whole:,.0f}, and context to no more."
    return data, set_steps(settings.trainer, data, settings.samples_per_step, advice)


def make_data(
    settings: Settings, hardware: Hardware, own: Tokenizer | None = None
) -> TextDataModule:
    """Build the data module. Its micro-batch is set later, once the model is known.

    `own` is a run's tokenizer; it is used if data.tokenizer=bpe, which would otherwise train a
    tokenizer on this text.
    """
    data, step = settings.data, settings.samples_per_step
    source, validation = make_sources(data)
    requested = data.validation_tokens
    if requested is not None:
        requested = max(1, requested // settings.context)
    most = max(1, MAX_VALIDATION_TOKENS // settings.context)
    return _module(data)(
        source,
        own
        if own is not None and data.tokenizer == "bpe"
        else make_tokenizer_spec(data, settings.model.path),
        settings.context,
        batch_size=step // settings.data_ranks,
        document_mask=settings.applied_mask.documents,
        validation=validation,
        split_context=data.split_context,
        validation_batch=settings.trainer.validation_micro_batch,
        seed=settings.seed,
        num_workers=loader_workers(data, hardware.kind),
        **reading_options(data, settings.trainer, requested=requested, step=step, most=most),
    )


def _module(data: DataSettings) -> Callable[..., TextDataModule]:
    """Return the class of a source's data module, with arguments from the settings that only this
    class uses."""
    if data.source != "chat":
        from flashtrain.data.streaming import StreamingDataModule

        return StreamingDataModule if data.streaming else TextDataModule
    from flashtrain.data.chat_datamodule import ChatDataModule
    from flashtrain.data.chat_rendering import read_template

    names = ("train_on", "text_column", "check_answers", "too_long", "skip_broken")
    own = {name: getattr(data, name) for name in names}
    return partial(ChatDataModule, template=read_template(data.chat_template), **own)


def model_builder(settings: Settings) -> Callable[..., Trainable]:
    """Return a function build(vocab_size=, attention=) that makes the model, with random weights or
    those that `weights` names.

    Raises:
        UserError: the model does not suit the settings, as far as that is known
            before any text is read.
    """
    model, weights = settings.model, settings.weights
    if settings.resume not in (None, "auto"):  # its checkpoint has the adapter
        model = replace(model, adapter_path=None)
    if weights is not None:
        start = weights_at_context(weights, model, settings.context)
        check_shape(settings.sharding, start[0])
        if settings.data.tokenizer not in ("bpe", "huggingface"):  # whose tokens are known later
            check_tokens(weights, start[0], vocabulary_of(settings.data))
        return partial(model_of_weights, weights, start, residual=model.residual)
    if model.interpolate_positions:
        raise UserError(
            "model.interpolate_positions=true stretches trained positions and needs weights=..., "
            "whose positions they are. Set both, or model.interpolate_positions=false."
        )
    if model.name in FAMILIES:
        decoder_config(model.name, model, vocab_size=1, context=settings.context)
    check = getattr(component("model", model.name), "check", None)
    if check is not None:  # of a model that has its own weights
        spec, known = make_tokenizer_spec(settings.data, model.path), 0
        if isinstance(spec, Tokenizer):
            known = spec.vocab_size
        elif settings.data.tokenizer != "bpe":
            known = vocabulary_of(settings.data)
        check(model, vocab_size=known, context=settings.context)
    return partial(make_model, model, context=settings.context)


def language_model(
    settings: Settings,
    hardware: Hardware,
    model: Trainable,
    description: dict[str, Any],
    make: MakeTask = LanguageModel,
) -> LanguageModel:
    """Build the LightningModule that trains this model as the settings say."""
    return make(
        model,
        document_mask=settings.applied_mask.documents,
        mask=make_mask(settings.applied_mask),
        cuda_graphs=settings.trainer.cuda_graphs,
        compile=compiles(settings, hardware),
        description=description,
        **optimization_options(settings),
    )


def describe_model(model: Trainable, settings: Settings, *, vocab_size: int) -> dict[str, Any]:
    """Return plain values that a checkpoint stores about its model: enough to rebuild the model,
    and to detect that a run has another one."""
    # The shape first: a transformers model's configuration is a dataclass too, and holds
    # more than plain values.
    config = getattr(model, "config", None)
    shape = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    shape = shape if model.shape is None else model.shape.plain()
    return {
        "name": settings.model.name,
        "size": settings.model.size,
        "vocab_size": vocab_size,
        "shape": shape,
    }


def _say_sample(
    settings: Settings,
    hardware: Hardware,
    model: Trainable,
    data: TextDataModule,
    trainer: pl.Trainer,
) -> None:
    """Print a text that the trained model generates, on the first rank, and save it in the run's
    folder. Every rank must call this."""
    # Ranks that have only a part of the weights write too: the weights are
    # gathered a block at a time.
    if not model.can_generate or not (trainer.is_global_zero or settings.shards_weights):
        return
    try:
        model.to(hardware.kind)  # Lightning leaves the weights in main memory when a fit ends
        text = continue_text(model, data.tokenizer, settings)
        if trainer.is_global_zero:
            write_atomically(Path(trainer.default_root_dir) / SAMPLE, text + "\n")
    except Exception as problem:  # noqa: BLE001 - reported: whatever it is, the training has not failed
        say(f"no sample of generated text: {first_line(problem)}")
        return
    if trainer.is_global_zero:
        say(f"\na sample of what it writes now:\n{indent(text, '    ')}")
