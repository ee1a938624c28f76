"""Train any task with Lightning's Trainer, up to the last validation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import Strategy

from flashtrain.errors import RunFailed, UserError, first_line
from flashtrain.folders.run_folder import CHECKPOINTS, LAST, note_failure
from flashtrain.interruption import Stopped
from flashtrain.registry import component
from flashtrain.run.job_process import leading_ranks
from flashtrain.settings.settings import Settings
from flashtrain.settings.training import TrainerSettings
from flashtrain.spec import StageContext, TrainingSetup
from flashtrain.training.checkpoint_callbacks import checkpoint_callbacks, keep_if_best
from flashtrain.training.checkpoints import AtomicCheckpointIO, read_checkpoint
from flashtrain.training.early_stopping import StopOnNonFinite, StopWithoutGain
from flashtrain.training.hardware import Hardware, gpu_index
from flashtrain.training.killed_ranks import killed_rank, lost_connection
from flashtrain.training.loggers import LogRates, close_loggers, log_summary, make_loggers
from flashtrain.training.out_of_memory import (
    OTHERWISE,
    OutOfMemory,
    is_out_of_memory,
    out_of_memory_line,
)
from flashtrain.training.progress import LineProgress
from flashtrain.training.random_state import RandomState
from flashtrain.training.resumed_rates import RatesOfThisRun
from flashtrain.training.signals import SaveOnSignal, StoppedInValidation
from flashtrain.training.validation import DueValidation


def fit(
    prepared: TrainingSetup,
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    *,
    resumed: Path | None,
    started: float,
    finish: Callable[[pl.Trainer], dict[str, Any]],
) -> dict[str, Any]:
    """Train to the end, validate unless the last step was validated, and return finish(trainer).

    Args:
        prepared: the task, its data, batching and callbacks.
        settings: the settings of the run, or of one of its stages.
        hardware: the device to train on.
        folder: the run's folder.
        resumed: the checkpoint to resume from; None: begin anew.
        started: time.monotonic() at the command's start.
        finish: called after the last validation with the Trainer; returns the summary row.

    Raises:
        Stopped: after a signal, or after trainer.max_minutes.
        OutOfMemory: the device ran out of memory.
    """
    task, data, batching, stage = prepared.task, prepared.data, prepared.batching, prepared.stage
    logs = stage.logs if stage else folder
    minutes = settings.trainer.max_minutes
    signals = SaveOnSignal(until=None if minutes is None else started + 60 * minutes)
    due = DueValidation(settings.trainer.validate_every)
    own = [
        prepared.throughput,
        StopOnNonFinite(),
        signals,
        RatesOfThisRun(),
        RandomState(settings.seed),
        SameCheckpoint(resumed),
        due,
        *early_stopping(settings.trainer, prepared),
        *prepared.callbacks,
        *checkpoint_callbacks(
            folder / CHECKPOINTS,
            settings.trainer.checkpoint_every,
            prepared.monitor,
            prepared.mode,
            keep=settings.trainer.keep_checkpoints,
            stage=f"{logs.name}-" if logs != folder else "",
        ),
        LogRates(),
        LineProgress(settings.trainer.log_every),
        *(component("callback", name)(settings) for name in settings.trainer.callbacks),
    ]
    trainer = make_trainer(
        settings, hardware, folder, own, accumulate=batching.accumulate, logs=logs
    )
    tune = getattr(task.model, "tune_kernels", None)
    if tune is not None and hardware.kind == "cuda":  # before ranks wait for each other
        tune(gpu_index(), hardware.precision, shared=settings.shares_sequences)
    try:
        try:
            with leading_ranks(settings.trainer.ranks > 1), naming_killed_ranks(trainer):
                trainer.fit(
                    task, data, ckpt_path=str(resumed) if resumed else None, weights_only=True
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                # Lightning's teardown moves the model to the CPU, which fails after its
                # weights were refused.
                raise (
                    error.__context__ if isinstance(error.__context__, UserError) else error
                ) from None
            size = batching.micro_batch
            line = out_of_memory_line(
                error,
                batching.estimate,
                free_bytes=hardware.free_memory_bytes,
                micro_batch=size,
                # a task with its own advice has its own setting for the micro-batch
                alternatives=[
                    one
                    for one in batching.alternatives
                    if prepared.advice is None or one.micro_batch == size
                ],
                saved=folder if (folder / CHECKPOINTS / LAST).exists() else None,
                advice=prepared.advice or OTHERWISE,
            )
            raise OutOfMemory(line) from error
        if signals.stopped_by is not None or signals.out_of_time:
            raise stopped(signals, folder, stage)
        step = trainer.global_step
        if not (due.made and due.step == step):
            with naming_killed_ranks(trainer), _logged_with_last_step(trainer):
                trainer.validate(task, data, verbose=False)
            keep_if_best(trainer)
        if stage is not None and stage.before_saving is not None:
            stage.before_saving()
            trainer.save_checkpoint(folder / CHECKPOINTS / LAST)
        if stage is not None and stage.goes_on:
            signals.take_late(trainer)
            if signals.stopped_by is not None or signals.out_of_time:
                raise stopped(signals, folder, stage)
        with naming_killed_ranks(trainer), _logged_with_last_step(trainer):
            row = finish(trainer)
        if trainer.is_global_zero:
            log_summary(trainer.loggers, row)
    except StoppedInValidation:
        raise stopped(signals, folder, stage) from None
    except Exception as error:
        if signals.stopped_by is None or isinstance(error, Stopped | UserError | RunFailed):
            raise
        line = f"{signals.stopped_by.name} ended step {signals.stopped_at}: {first_line(error)}"
        raise Stopped(line, signals.exit_code) from error
    finally:
        close_loggers(trainer.loggers)
    return row


def early_stopping(options: TrainerSettings, prepared: TrainingSetup) -> list[pl.Callback]:
    """Return a list with the callback of trainer.early_stopping_patience; [] without."""
    if options.early_stopping_patience is None:
        return []
    monitor, mode = options.early_stopping_monitor or prepared.monitor, prepared.mode
    if monitor != prepared.monitor:
        mode = "min" if monitor.endswith(("loss", "perplexity")) else "max"
    return [StopWithoutGain(monitor, mode, options.early_stopping_patience)]


class SameCheckpoint(pl.Callback):
    """Raises UserError if the machines of a job do not resume from the same checkpoint, or if its
    optimizer groups are not the run's."""

    def __init__(self, resumed: Path | None) -> None:
        self.resumed = resumed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        first = trainer.strategy.broadcast(self.resumed)
        if first != self.resumed:
            raise UserError(
                f"the first machine resumes from {first}, and this one from {self.resumed}: "
                "it has no such checkpoint. Set output=FOLDER to a folder that all machines share."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        saved = {} if self.resumed is None else read_checkpoint(self.resumed, mmap=True)
        states = saved.get("optimizer_states", [])
        there = [len(group["params"]) for state in states for group in state["param_groups"]]
        here = [
            len(group["params"])
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]
        if there and here != there:
            raise UserError(
                f"{self.resumed} has optimizer groups of {there} parameters, and this run {here}: "
                "the checkpoint is of other settings, or of an older version. Resume it with "
                "these, or start a new run from its weights: weights=RUN."
            )


@contextlib.contextmanager
def naming_killed_ranks(trainer: pl.Trainer) -> Iterator[None]:
    """Context manager: if a collective fails because a process was killed, raise RunFailed with
    that process's rank or host."""
    try:
        yield
    except RuntimeError as error:  # raised by a failed collective
        if is_out_of_memory(error):
            raise
        killed = killed_rank(getattr(trainer.strategy.launcher, "procs", ())) or lost_connection(
            error
        )
        if killed is None:
            raise
        raise RunFailed(f"{killed}. The job ends.") from error


@contextlib.contextmanager
def _logged_with_last_step(trainer: pl.Trainer) -> Iterator[None]:
    """Context manager: log the metrics of a validation or test after the fit under the fit's last
    step."""
    # Lightning would log it under the next step or, in a resumed run, under either of the two.
    loop = trainer.fit_loop.epoch_loop
    before, loop._batches_that_stepped = loop._batches_that_stepped, max(0, trainer.global_step - 1)
    try:
        yield
    finally:
        loop._batches_that_stepped = before


def make_trainer(
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    callbacks: list[pl.Callback],
    *,
    accumulate: int,
    logs: Path,
) -> pl.Trainer:
    """Make Lightning's Trainer for these settings. It writes into `folder`, its loggers into
    `logs`; a step has `accumulate` micro-batches."""
    options = settings.trainer
    accelerator = "gpu" if hardware.kind == "cuda" else "cpu"
    return pl.Trainer(
        accelerator=accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=strategy_for(settings, folder),
        precision=hardware.precision,  # type: ignore[arg-type]
        max_steps=options.steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=min(options.validate_every, options.steps) * accumulate,
        log_every_n_steps=min(options.log_every, options.steps),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        # Calls torch.use_deterministic_algorithms, which our kernels read too. None leaves a
        # caller's own choice.
        deterministic=options.deterministic or None,
        enable_model_summary=False,
        callbacks=callbacks,
        logger=run_loggers(settings, logs),
        plugins=[AtomicCheckpointIO()],
        default_root_dir=str(folder),
    )


def strategy_for(settings: Settings, folder: Path) -> Strategy | str:
    """Return the strategy of these settings; for one device "auto", without importing
    flashtrain.distributed."""
    if settings.strategy == "auto" and settings.trainer.ranks == 1:
        return "auto"
    from flashtrain.distributed.strategies import make_strategy

    return make_strategy(
        settings.strategy, settings.trainer.checkpoint_format, **strategy_options(settings, folder)
    )


def strategy_options(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the arguments of ContextParallelStrategy for a run in `folder`; {} if
    another strategy is set."""
    if not settings.shares_sequences:
        return {}
    return {
        "context_parallel_size": settings.context_degree,
        "method": settings.trainer.context_parallel_method,
        "layout": settings.trainer.context_parallel_layout,
        "groups": settings.trainer.context_parallel_groups,
        # Without a document mask a row is one causal sequence, even if it packs several documents.
        "documents": "documents" if settings.applied_mask.documents else None,
        "timeout_seconds": settings.trainer.timeout_seconds,
        "on_failure": partial(note_failure, folder),
    }


def run_loggers(settings: Settings, folder: Path) -> list[Any]:
    """Make the loggers of these settings, which write into `folder`."""
    return make_loggers(
        settings.logger.kinds,
        folder,
        project=settings.logger.project,
        name=settings.logger.run_name or f"{settings.recipe}-{folder.name}",
        group=settings.logger.group,
        config=asdict(settings),
        mode=settings.logger.mode,
    )


def stopped(signals: SaveOnSignal, folder: Path, stage: StageContext | None) -> Stopped:
    """Return the exception with which a run, or a `stage` of one, ends that a signal or its time
    limit stopped; its exit status is 0 for the time limit, else 128 + the signal's number."""
    reason = "trainer.max_minutes" if signals.stopped_by is None else signals.stopped_by.name
    return Stopped(
        f"stopped at step {signals.stopped_at} ({reason}), checkpoint saved. "
        f"Continue with the same command plus resume={folder}",
        signals.exit_code,
        None if stage else signals.stopped_at,  # stages count their own steps
    )
