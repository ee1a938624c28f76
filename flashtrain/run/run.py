"""One run: build model, data, task and trainer from checked settings; train; leave the folder and its summary row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.announce import say
from flashtrain.data.datamodule import TextDataModule
from flashtrain.distributed.sharding import full_state_dict
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.trainable import Trainable
from flashtrain.run.batching import Batching, choose_batching, compiles
from flashtrain.run.checkpoint_model import build_model, checkpoint_to_resume, describe_model
from flashtrain.run.components import make_source, make_tokenizer_spec, optimizer_builder, schedule_builder
from flashtrain.run.context_run import check_model, context_columns, describe_context
from flashtrain.run.fitting import fit, metric
from flashtrain.run.run_folder import RUNNING, TOKENIZER, write_config, write_summary
from flashtrain.run.sample import continue_text, default_prompt
from flashtrain.run.summary import finished_row, model_name, planned_row
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import FREE_SHARE, GIB
from flashtrain.training.throughput import Throughput
from flashtrain.training.validation_share import describe_validation, held_out_samples

MOST_VALIDATION_TOKENS = 524_288  # of each validation, where data.validation_tokens says nothing


def train(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Train as the settings say, in `folder`, and return the summary row.

    started: time.time() at the command's start. Raises UserError for what the user can mend, Stopped after a signal.
    """
    pl.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision("high")
    data = make_data(settings, hardware)
    data.prepare_data()
    data.setup()
    say(data.describe())
    model = build_model(settings, vocab_size=data.tokenizer.vocab_size, attention=hardware.attention)
    check_model(settings, model)
    batching = choose_batching(settings, hardware, model)
    data.batch_size, data.accumulate = batching.micro_batch, batching.accumulate
    if isinstance(model, GPT2):
        model.save_memory(batching.savings)
    description = describe_model(model, settings, vocab_size=data.tokenizer.vocab_size)
    resumed = checkpoint_to_resume(settings, folder, description)

    # Everything that a user can have got wrong is checked: from here on the folder is this run's.
    say(describe(settings, hardware, model, batching))
    if data.validation_tokens:
        asked, every = settings.data.validation_tokens, settings.trainer.validate_every
        say(describe_validation(data.held_out_rows, asked, every, "data.validation_tokens"))
    write_config(settings, folder)
    data.tokenizer.save(folder / TOKENIZER)
    write_summary(folder, {**planned_row(settings, hardware, overrides), "status": RUNNING})
    task = make_task(settings, hardware, model, description)
    throughput = Throughput(
        model.flops_per_token(settings.context), settings.trainer.tokens_per_step, peak_flops=hardware.peak_flops
    )

    def finish(trainer: pl.Trainer) -> dict[str, Any]:
        row = finished_row(
            settings,
            hardware,
            model=model,
            task=task,
            data=data,
            throughput=throughput,
            micro_batch=batching.micro_batch,
            validation_loss=metric(trainer, "validation_loss"),
            steps=trainer.global_step,
            seconds=time.time() - started,
            overrides=overrides,
        )
        row.update(context_columns(settings, hardware, model, batching.micro_batch))
        row["memory"] = batching.savings.describe() or "none"
        row["memory_estimate_gib"] = None if batching.estimate is None else round(batching.estimate.total / GIB, 2)
        _say_sample(settings, hardware, model, data, first=trainer.is_global_zero)
        return row

    return fit(
        settings,
        hardware,
        folder,
        task,
        data,
        throughput,
        resumed=resumed,
        started=started,
        finish=finish,
        batching=batching,
    )


def make_task(settings: Settings, hardware: Hardware, model: Trainable, description: dict[str, Any]) -> LanguageModel:
    """The task that trains this model as the settings say: its optimiser, schedule, clipping and compilation."""
    return LanguageModel(
        model,
        make_optimizer=optimizer_builder(settings),
        make_schedule=schedule_builder(settings),
        document_mask=settings.data.document_mask,
        gradient_clip=settings.optimizer.gradient_clip,
        compile=compiles(settings, hardware),
        cuda_graphs=settings.trainer.cuda_graphs,
        description=description,
    )


def make_data(settings: Settings, hardware: Hardware) -> TextDataModule:
    """The data module of these settings; its micro-batch is set once the model is known."""
    workers, asked = settings.data.workers, settings.data.validation_tokens
    return TextDataModule(
        make_source(settings),
        make_tokenizer_spec(settings),
        settings.context,
        batch_size=settings.samples_per_step // settings.data_ranks,
        total_steps=settings.trainer.steps,
        seed=settings.seed,
        document_mask=settings.data.document_mask,
        validation_fraction=settings.data.validation_fraction,
        split_context=settings.data.split_context,
        validation_samples=held_out_samples(
            None if asked is None else max(1, asked // settings.context),
            settings.trainer.validate_every,
            settings.samples_per_step,
            most=max(1, MOST_VALIDATION_TOKENS // settings.context),
        ),
        validation_batch=settings.trainer.validation_micro_batch,
        num_workers=(2 if hardware.kind == "cuda" else 0) if workers is None else workers,
        cache_dir=settings.data.cache_dir,
    )


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
