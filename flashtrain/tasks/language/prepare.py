"""What one training of a language model takes, from checked settings: model, data, task and plan; what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.announce import say
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.tokenizers import Tokenizer, as_prompt, begin_of, load_tokenizer, without_begin
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import parse_json, read_json
from flashtrain.folders.run_folder import SAMPLE, TOKENIZER
from flashtrain.models.generation import generate
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.gpt2_config import FAMILIES
from flashtrain.models.trainable import Trainable
from flashtrain.registry import component
from flashtrain.settings.data import DataSettings
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainingSetup
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.batching import Batching, choose_batching, compiles, memory_plan, memory_words, plan_text
from flashtrain.tasks.components import (
    attended_context,
    decoder_config,
    loader_workers,
    make_mask,
    make_model,
    make_source,
    make_sources,
    make_tokenizer_spec,
    optimizer_builder,
    schedule_builder,
    vocabulary_of,
)
from flashtrain.tasks.context_run import check_model, check_shape, context_columns, describe_context, plan_lines
from flashtrain.tasks.training_task import metric
from flashtrain.training.callbacks import describe_validation, held_out_samples
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput

CHAT = "chat"  # the source whose rows are conversations
MOST_VALIDATION_TOKENS = 524_288  # of each validation, where data.validation_tokens says nothing


def make_task(settings: Settings, hardware: Hardware, model: Trainable, description: dict[str, Any]) -> LanguageModel:
    """The task that trains this model as the settings say: its optimiser, schedule, clipping and compilation."""
    return LanguageModel(
        model,
        make_optimizer=optimizer_builder(settings),
        make_schedule=schedule_builder(settings),
        document_mask=settings.within_documents,
        mask=make_mask(settings),
        gradient_clip=settings.optimizer.gradient_clip,
        compile=compiles(settings, hardware),
        cuda_graphs=settings.trainer.cuda_graphs,
        description=description,
    )


def make_data(settings: Settings, hardware: Hardware, own: Tokenizer | None = None) -> TextDataModule:
    """The data module of these settings; its micro-batch is set once the model is known. own: the tokenizer of a run,
    in place of the one that the settings would train on this text."""
    requested, (source, validation) = settings.data.validation_tokens, make_sources(settings)
    whole = requested is None and settings.data.validation_fraction == 1
    return _module(settings.data)(
        source,
        own if own is not None and settings.data.tokenizer == "bpe" else make_tokenizer_spec(settings),
        settings.context,
        batch_size=settings.samples_per_step // settings.data_ranks,
        total_steps=settings.trainer.steps,
        seed=settings.seed,
        document_mask=settings.within_documents,
        validation=validation,
        validation_fraction=settings.data.validation_fraction,
        split_context=settings.data.split_context,
        validation_samples=sys.maxsize
        if whole
        else held_out_samples(
            None if requested is None else max(1, requested // settings.context),
            settings.trainer.validate_every,
            settings.samples_per_step,
            most=max(1, MOST_VALIDATION_TOKENS // settings.context),
        ),
        validation_batch=settings.trainer.validation_micro_batch,
        num_workers=loader_workers(settings.data.workers, hardware),
        cache_dir=settings.data.cache_dir,
    )


def _module(data: DataSettings) -> Callable[..., TextDataModule]:
    """The data module of a source, with the settings that only it uses."""
    if data.source != CHAT and not data.streaming:
        return TextDataModule
    if data.source != CHAT:
        from flashtrain.data.streaming import StreamingDataModule

        return StreamingDataModule
    from flashtrain.data.chat_datamodule import ChatDataModule
    from flashtrain.data.chat_template import read_template

    return partial(
        ChatDataModule,
        template=read_template(data.chat_template),
        train_on=data.train_on,
        text_column=data.text_column,
        too_long=data.too_long,
        skip_broken=data.skip_broken,
    )


def prepare(settings: Settings, hardware: Hardware) -> TrainingSetup:
    """A language model, its data and its task. UserError: for what the user can mend."""
    build_model = model_builder(settings)
    data = make_data(settings, hardware, tokenizer_of_weights(settings))
    data.prepare_data()
    data.setup()
    model = build_model(vocab_size=data.tokenizer.vocab_size, attention=hardware.attention)
    check_model(settings, model)
    model.keep_in(hardware.precision)
    batching = choose_batching(settings, hardware, model)
    data.batch_size, data.accumulate = batching.micro_batch, batching.accumulate
    model.save_memory(batching.savings)
    description = describe_model(model, settings, vocab_size=data.tokenizer.vocab_size)
    said = [data.describe(), describe(settings, hardware, model, batching), *describe_mask(settings)]
    epochs = data.epochs_of_parts(settings.trainer.steps * settings.samples_per_step)
    said += [epochs] if epochs else []
    if data.validation_tokens:
        requested, every = settings.data.validation_tokens, settings.trainer.validate_every
        said.append(describe_validation(data.held_out_samples, requested, every, "data.validation_tokens"))
    task = make_task(settings, hardware, model, description)
    flops = model.flops_per_token(attended_context(settings))
    throughput = Throughput(flops, settings.trainer.tokens_per_step, peak_flops=hardware.peak_flops)

    def row(trainer: pl.Trainer) -> dict[str, Any]:
        found = {
            **_found(settings, trainer, task, data, throughput, batching.micro_batch),
            **context_columns(settings, hardware, model, batching.micro_batch),
        }
        _say_sample(settings, hardware, model, data, Path(trainer.default_root_dir), first=trainer.is_global_zero)
        return found

    return TrainingSetup(
        data,
        task,
        throughput,
        batching,
        description,
        said,
        row,
        tokenizer=data.tokenizer,
    )


def tokenizer_of_weights(settings: Settings) -> Tokenizer | None:
    """That of the run whose weights the training starts from; None where they are no run's."""
    if settings.weights is None:
        return None
    from flashtrain.tasks.language.trained import run_of_weights

    run = run_of_weights(settings)
    if run is None:
        return None
    found = load_tokenizer(run / TOKENIZER)
    return found if settings.data.begin_of_text else without_begin(found)


def model_builder(settings: Settings) -> Callable[..., Trainable]:
    """build(vocab_size=, attention=) -> the model to train: with random weights, or starting from `weights` (see
    trained.starting_weights), at `context`.

    What the weights or the model's own settings cannot serve raises UserError here, before any text is read.
    """
    if settings.weights is not None:
        from flashtrain.tasks.language.trained import check_tokens, model_of_weights, weights_at_context

        start = weights_at_context(settings)
        check_shape(settings, start[0])
        if settings.data.tokenizer not in ("bpe", "huggingface"):  # whose tokens are known later
            check_tokens(settings, start[0], vocabulary_of(settings.data))
        return partial(model_of_weights, settings, start)
    if settings.model.interpolate_positions:
        raise UserError("model.interpolate_positions=true stretches trained positions: it needs weights=...")
    if settings.model.name in FAMILIES:  # whatever the text's tokens are
        decoder_config(settings.model.name, settings.model, vocab_size=1, context=settings.context)
    check = getattr(component("model", settings.model.name), "check", None)
    if check is not None:  # of a model that has its own weights
        spec = make_tokenizer_spec(settings)
        trained_on_text = settings.data.tokenizer == "bpe"
        known = (
            spec.vocab_size if isinstance(spec, Tokenizer) else 0 if trained_on_text else vocabulary_of(settings.data)
        )
        check(settings.model, vocab_size=known, context=settings.context)
    return partial(make_model, settings)


def describe_model(model: Trainable, settings: Settings, *, vocab_size: int) -> dict[str, Any]:
    """What a checkpoint says of its model, in plain values: enough to rebuild it and to notice another one."""
    # The shape first: a transformers model's configuration is a dataclass too, and holds more than plain values.
    known = [one for one in (model.shape, getattr(model, "config", None)) if is_dataclass(one)]
    shape = asdict(known[0]) if known and not isinstance(known[0], type) else {}
    return {"name": settings.model.name, "size": settings.model.size, "vocab_size": vocab_size, "shape": shape}


def describe(settings: Settings, hardware: Hardware, model: Trainable, batching: Batching) -> str:
    """The line that says what is about to be trained, on what, in what portions."""
    parameters = model.parameter_count() / 1e6
    shared = describe_context(settings, hardware, model, batching.micro_batch)
    return (
        f"{settings.named(settings.model.label)}: {parameters:.1f}M parameters, context {settings.context}, "
        f"attention {hardware.attention}; "
        f"{settings.trainer.steps} steps of {settings.samples_per_step} samples "
        f"({settings.trainer.tokens_per_step:,} tokens) on "
        f"{settings.trainer.ranks} x {hardware.name}, {hardware.precision}, "
        f"micro-batch {batching.micro_batch}{shared}{memory_words(batching)}"
    )


def describe_mask(settings: Settings) -> list[str]:
    """The line that says what a token sees, and what of it is counted; none under the causal mask."""
    label = settings.mask_label
    if label == "causal":
        return []
    seen = attended_context(settings)
    counted = "FLOPs count all of a row" if seen == settings.context else f"FLOPs count rows as of {seen:,} tokens"
    documents = ", whatever documents it is packed of" if settings.within_documents else ""
    return [f"mask {label}: {counted}{documents}"]


def _say_sample(
    settings: Settings, hardware: Hardware, model: Trainable, data: TextDataModule, folder: Path, *, first: bool
) -> None:
    """Print, on the first rank, what the trained model writes, and keep it; every rank calls it.

    Whatever goes wrong in it is said in a line: the training is finished.
    """
    if not model.generates:
        return
    try:
        text = _sample(settings, hardware, model, data, first=first)
        if text is not None:
            write_atomically(folder / SAMPLE, text + "\n")
    except Exception as problem:  # noqa: BLE001 - said, and whatever it is, no failure of the training
        reason = " ".join(str(problem).split())[:300] or type(problem).__name__
        say(f"no sample of what it writes: {reason}")
        return
    if text is not None:
        say(f"\na sample of what it writes now:\n{text}")


def _sample(
    settings: Settings, hardware: Hardware, model: Trainable, data: TextDataModule, *, first: bool
) -> str | None:
    """What the trained model writes; None on the other ranks, which write it too where weights are sharded: they are
    gathered a block at a time, and no rank has to hold them all."""
    if not first and not settings.shards_weights:
        return None
    model.to(hardware.kind)  # Lightning leaves the weights in main memory when a fit ends
    text = continue_text(model, data.tokenizer, settings)
    return text if first else None


def _found(
    settings: Settings,
    trainer: pl.Trainer,
    task: LanguageModel,
    data: TextDataModule,
    throughput: Throughput,
    micro_batch: int,
) -> dict[str, Any]:
    """The part of the row that the training reports. Losses in nats a token, memory in GiB, time in seconds."""
    return {
        "parameters": task.model.parameter_count(),
        "micro_batch": micro_batch,
        "steps": trainer.global_step,
        "tokens": trainer.global_step * settings.trainer.tokens_per_step,
        "epochs": round(data.epochs_seen, 3),
        "train_loss_first": task.first_loss,
        "train_loss": task.last_loss,
        "validation_loss": metric(trainer, "validation_loss"),
        **throughput.columns(),
    }


def plan_language(settings: Settings, hardware: Hardware) -> str:
    """Parameters, tokens, estimated memory and time of the run, as lines to print. Builds no weights, reads no text."""
    vocab_size = vocabulary_of(settings.data)
    build_model: Callable[..., Trainable] = partial(make_model, settings, vocab_size=vocab_size)
    if settings.weights is not None:
        from flashtrain.tasks.language.trained import weights_at_context

        config, _ = weights_at_context(settings)
        build_model = partial(GPT2, config, residual=settings.model.residual)
    with torch.device("meta"):
        model = build_model(attention=hardware.attention)
    check_model(settings, model)
    model.keep_in(hardware.precision)
    batching = choose_batching(settings, hardware, model)
    tokens = settings.trainer.steps * settings.trainer.tokens_per_step
    flops = tokens * model.flops_per_token(attended_context(settings))
    lines = [
        describe(settings, hardware, model, batching),
        f"text: {make_source(settings).describe()}; tokenizer {settings.data.tokenizer}",
        f"tokens: {tokens:,} ({settings.trainer.steps} steps of {settings.trainer.tokens_per_step:,})",
        *describe_mask(settings),
        *plan_lines(settings, hardware, model, batching.micro_batch),
        *memory_plan(batching),
    ]
    return plan_text(lines, settings, hardware, flops)


def continue_text(model: Trainable, tokenizer: Tokenizer, settings: Settings) -> str:
    """The prompt and what the model writes after it, as the settings say, under its mask. Of a conversation, as every
    prompt is where conversations are the data, the answer alone, without the chat template's tokens. Raises UserError
    for a model that does not generate."""
    from flashtrain.tasks.language.ends import generation_ends  # a plan needs none of it

    device = next(model.parameters()).device
    prompt, options = settings.prompt or settings.data.first_words, settings.generate
    row, template = conversation_of(prompt), None
    if row is None and settings.data.source == CHAT:
        row = {"messages": [{"role": "user", "content": prompt}]}
    if row is not None:
        from flashtrain.data.chat_template import ChatTemplate

        template = ChatTemplate(tokenizer)
    begin = as_prompt(tokenizer, prompt) if template is None or row is None else template.prompt(row)
    tokens = torch.tensor([begin], device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda" and torch.cuda.is_bf16_supported()):
        written = generate(
            model,
            tokens,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=settings.seed,
            end_of_text=generation_ends(model, tokenizer, chat=template is not None),
            mask=make_mask(settings, packed=False),
        )[0].tolist()
    if template is not None:
        return template.tokenizer.decode(written[len(begin) :], special=False)
    return tokenizer.decode(written[len(begin_of(tokenizer)) :])


def conversation_of(prompt: str) -> dict[str, Any] | None:
    """The conversation that a prompt names, a .json file, or is, as JSON: a list of messages, or an object with
    `messages` and perhaps `tools`. None: it is a text. UserError: the file has none."""
    named = prompt.endswith(".json") and (" " not in prompt or Path(prompt).expanduser().is_file())
    try:
        given = read_json(Path(prompt).expanduser()) if named else parse_json(prompt, "prompt")
    except UserError:
        if named:
            raise
        return None
    row = {"messages": given} if isinstance(given, list) else given if isinstance(given, dict) else {}
    messages = row.get("messages")
    spoken = isinstance(messages, list) and any(isinstance(one, dict) and "role" in one for one in messages)
    return row if named or spoken else None
