"""What one training of a language model takes: model, data and task of checked settings; and what came out of it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.data.datamodule import TextDataModule
from flashtrain.distributed.sharding import full_state_dict
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.memory_savings import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.batching import Batching, choose_batching
from flashtrain.tasks.context_run import check_model, context_columns, describe_context
from flashtrain.tasks.language.build import make_data, make_task
from flashtrain.tasks.language.checkpoint import build_model, describe_model
from flashtrain.tasks.language.rows import model_name
from flashtrain.tasks.language.sample import continue_text, default_prompt
from flashtrain.tasks.training_task import metric
from flashtrain.training.callbacks import describe_validation
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import FREE_SHARE, GIB
from flashtrain.training.throughput import Throughput


def prepare(settings: Settings, hardware: Hardware) -> Prepared:
    """A language model, its data and its task. UserError: for what the user can mend."""
    data = make_data(settings, hardware)
    data.prepare_data()
    data.setup()
    model = build_model(settings, vocab_size=data.tokenizer.vocab_size, attention=hardware.attention)
    check_model(settings, model)
    batching = choose_batching(settings, hardware, model)
    data.batch_size, data.accumulate = batching.micro_batch, batching.accumulate
    if isinstance(model, GPT2):
        model.save_memory(batching.savings)
    description = describe_model(model, settings, vocab_size=data.tokenizer.vocab_size)
    said = [data.describe(), describe(settings, hardware, model, batching)]
    if data.validation_tokens:
        asked, every = settings.data.validation_tokens, settings.trainer.validate_every
        said.append(describe_validation(data.held_out_rows, asked, every, "data.validation_tokens"))
    task = make_task(settings, hardware, model, description)
    throughput = Throughput(
        model.flops_per_token(settings.context), settings.trainer.tokens_per_step, peak_flops=hardware.peak_flops
    )

    def row(trainer: pl.Trainer) -> dict[str, Any]:
        found = {
            **_found(settings, trainer, task, data, throughput, batching.micro_batch),
            **context_columns(settings, hardware, model, batching.micro_batch),
        }
        _say_sample(settings, hardware, model, data, first=trainer.is_global_zero)
        return found

    return Prepared(data, task, throughput, batching, description, said, row, tokenizer=data.tokenizer)


def describe(settings: Settings, hardware: Hardware, model: Trainable, batching: Batching) -> str:
    """The line that says what is about to be trained, on what, in what portions."""
    parameters = model.parameter_count() / 1e6
    savings = batching.savings.describe()
    shared = describe_context(settings, hardware, model, batching.micro_batch)
    doubt = "" if batching.fits else f", more than {FREE_SHARE:.0%} of what is free"
    memory = "" if batching.estimate is None else f" (estimated {batching.estimate.total / GIB:.1f} GiB{doubt})"
    return (
        f"{model_name(settings)}: {parameters:.1f}M parameters, context {settings.context}, "
        f"attention {hardware.attention}; "
        f"{settings.trainer.steps} steps of {settings.samples_per_step} samples "
        f"({settings.trainer.tokens_per_step:,} tokens) on "
        f"{settings.trainer.ranks} x {hardware.name}, {hardware.precision}, "
        f"micro-batch {batching.micro_batch}{shared}{', ' if savings else ''}{savings}{memory}"
    )


def _say_sample(settings: Settings, hardware: Hardware, model: Trainable, data: TextDataModule, *, first: bool) -> None:
    """Print, on the first rank, what the trained model writes; every rank calls it, since shards are gathered.

    Whatever goes wrong in it is said in a line: the training is finished.
    """
    if not isinstance(model, GPT2):
        return
    try:
        text = _sample(settings, hardware, model, data, first=first)
    except Exception as problem:  # noqa: BLE001 - said, and whatever it is, no failure of the training
        reason = " ".join(str(problem).split())[:300] or type(problem).__name__
        say(f"no sample of what it writes: {reason}")
        return
    if text is not None:
        say(f"\na sample of what it writes now:\n{text}")


def _sample(settings: Settings, hardware: Hardware, model: GPT2, data: TextDataModule, *, first: bool) -> str | None:
    """What the trained model writes; None on the other ranks."""
    if settings.shards_weights:
        weights = full_state_dict(model)
        if first:
            model = GPT2(model.config, attention=hardware.attention, residual=model.residual)
            model.load_state_dict(weights, assign=True)
    if not first:
        return None
    prompt = settings.prompt or default_prompt(settings.data.source)
    model.to(hardware.kind)  # Lightning leaves the weights in main memory when a fit ends
    return continue_text(model, data.tokenizer, prompt, settings.generate, seed=settings.seed)


def _found(
    settings: Settings,
    trainer: pl.Trainer,
    task: LanguageModel,
    data: TextDataModule,
    throughput: Throughput,
    micro_batch: int,
) -> dict[str, Any]:
    """The part of the row that the training told. Losses in nats a token, memory in GiB, time in seconds."""
    measured = throughput.summary()
    return {
        "parameters": task.model.parameter_count(),
        "micro_batch": micro_batch,
        "steps": trainer.global_step,
        "tokens": trainer.global_step * settings.trainer.tokens_per_step,
        "epochs": round(data.epochs_seen, 3),
        "train_loss_first": task.first_loss,
        "train_loss": task.last_loss,
        "validation_loss": metric(trainer, "validation_loss"),
        "tokens_per_second": measured["tokens_per_second"],
        "step_seconds": measured["step_seconds_median"],
        "mfu": measured["mfu"],
        "peak_memory_gib": measured["peak_memory_gib"],
    }
