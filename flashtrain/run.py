"""One run: build model, data, task and trainer from checked settings; train; leave the folder and its summary row."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.announce import say
from flashtrain.batching import Batching, choose_batching, compiles
from flashtrain.checkpoint_model import build_model, checkpoint_to_resume, describe_model
from flashtrain.components import (
    make_callbacks,
    make_source,
    make_tokenizer_spec,
    optimizer_builder,
    schedule_builder,
)
from flashtrain.context_run import check_model, context_columns, describe_context, strategy_options
from flashtrain.data.datamodule import TextDataModule
from flashtrain.distributed.sharding import full_state_dict
from flashtrain.distributed.strategies import make_strategy
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.trainable import Trainable
from flashtrain.run_folder import CHECKPOINTS, LAST, RUNNING, TOKENIZER, write_config, write_summary
from flashtrain.sample import continue_text, default_prompt
from flashtrain.settings import Settings
from flashtrain.summary import finished_row, model_name, planned_row
from flashtrain.tasks import LanguageModel
from flashtrain.training.checkpoints import AtomicCheckpointIO, checkpoint_callbacks, keep_if_best
from flashtrain.training.finite import StopOnNonFinite
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import close_loggers, log_summary, make_loggers
from flashtrain.training.memory import FREE_SHARE, GIB
from flashtrain.training.out_of_memory import OutOfMemory, is_out_of_memory, out_of_memory_line
from flashtrain.training.progress import make_progress
from flashtrain.training.signals import SaveOnSignal
from flashtrain.training.throughput import Throughput


class Stopped(Exception):
    """A signal ended the run early; its checkpoint is written. `status` is the exit status to end with."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


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
    write_config(settings, folder)
    data.tokenizer.save(folder / TOKENIZER)
    write_summary(folder, {**planned_row(settings, hardware, overrides), "status": RUNNING})
    task = make_task(settings, hardware, model, description)
    throughput = Throughput(
        model.flops_per_token(settings.context), settings.trainer.tokens_per_step, peak_flops=hardware.peak_flops
    )
    signals = SaveOnSignal(until=deadline(settings, started))
    callbacks = [
        throughput,
        StopOnNonFinite(),
        signals,
        *checkpoint_callbacks(folder / CHECKPOINTS, every_n_steps=settings.trainer.checkpoint_every),
        pl.callbacks.LearningRateMonitor(logging_interval="step"),
        make_progress(settings.trainer.log_every),
        *make_callbacks(settings),
    ]
    trainer = make_trainer(settings, hardware, folder, callbacks, accumulate=batching.accumulate)
    try:
        try:
            trainer.fit(task, data, ckpt_path=str(resumed) if resumed else None, weights_only=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise _out_of_memory(error, settings, hardware, batching, folder) from error
        if signals.stopped_by is not None or signals.out_of_time:
            raise stopped(signals, folder)
        if settings.trainer.steps % settings.trainer.validate_every:
            trainer.validate(task, data, verbose=False)
            keep_if_best(trainer)
        validation = trainer.callback_metrics.get("validation_loss")
        row = finished_row(
            settings,
            hardware,
            model=model,
            task=task,
            data=data,
            throughput=throughput,
            micro_batch=batching.micro_batch,
            validation_loss=None if validation is None else float(validation),
            steps=trainer.global_step,
            seconds=time.time() - started,
            overrides=overrides,
        )
        row.update(context_columns(settings, hardware, model, batching.micro_batch))
        row["memory"] = batching.savings.describe() or "none"
        row["memory_estimate_gib"] = None if batching.estimate is None else round(batching.estimate.total / GIB, 2)
        _say_sample(settings, hardware, model, data, first=trainer.is_global_zero)
        if trainer.is_global_zero:
            log_summary(trainer.loggers, row)
    finally:
        close_loggers(trainer.loggers)
    return row


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
    workers = settings.data.workers
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
        validation_samples=max(1, settings.data.validation_tokens // settings.context),
        num_workers=(2 if hardware.kind == "cuda" else 0) if workers is None else workers,
        cache_dir=settings.data.cache_dir,
    )


def make_trainer(
    settings: Settings, hardware: Hardware, folder: Path, callbacks: list[pl.Callback], *, accumulate: int
) -> pl.Trainer:
    """Lightning's Trainer for these settings, writing into `folder`."""
    options = settings.trainer
    accelerator = "gpu" if hardware.kind == "cuda" else "cpu"
    return pl.Trainer(
        accelerator=accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=make_strategy(
            settings.strategy, options.devices, options.nodes, accelerator, **strategy_options(settings, folder)
        ),
        precision=hardware.precision,  # type: ignore[arg-type]
        max_steps=options.steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=min(options.validate_every, options.steps) * accumulate,
        log_every_n_steps=min(options.log_every, options.steps),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_model_summary=False,
        callbacks=callbacks,
        logger=run_loggers(settings, folder),
        plugins=[AtomicCheckpointIO()],
        default_root_dir=str(folder),
    )


def run_loggers(settings: Settings, folder: Path) -> list[Any]:
    """The loggers that the settings name, writing into `folder`: of a training, or of a run that measures."""
    return make_loggers(
        settings.logger.name,
        folder,
        project=settings.logger.project,
        name=settings.logger.run_name or f"{settings.recipe}-{folder.name}",
        group=settings.logger.group,
        config=asdict(settings),
        mode=settings.logger.mode,
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


def deadline(settings: Settings, started: float) -> float | None:
    """The moment of time.time() at which trainer.max_minutes are over; None without a limit."""
    minutes = settings.trainer.max_minutes
    return None if minutes is None else started + 60 * minutes


def stopped(signals: SaveOnSignal, folder: Path) -> Stopped:
    """What a run ends with that a signal or its time limit stopped; the latter is no failure (exit status 0)."""
    if signals.out_of_time:
        return Stopped(
            f"trainer.max_minutes are over at step {signals.stopped_at}; the checkpoint is written. "
            f"To go on: the same command with resume={folder}",
            0,
        )
    name = signals.stopped_by.name if signals.stopped_by else "a signal"
    return Stopped(
        f"stopped by {name} at step {signals.stopped_at}; the checkpoint is written. "
        f"To go on: the same command with resume={folder}",
        signals.exit_code,
    )


def _out_of_memory(
    error: BaseException, settings: Settings, hardware: Hardware, batching: Batching, folder: Path
) -> OutOfMemory:
    saved = folder if (folder / CHECKPOINTS / LAST).exists() else None
    return OutOfMemory(
        out_of_memory_line(
            error,
            batching.estimate,
            free_bytes=hardware.free_memory_bytes,
            alternatives=batching.alternatives,
            saved=saved,
        )
    )
