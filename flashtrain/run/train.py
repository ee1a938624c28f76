"""Run a task's training, or its stages one after the other, and write the summary row."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback

from flashtrain.announce import say
from flashtrain.data.tokenizers import check_same_tokens
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import (
    FINISHED,
    RUNNING,
    SETTINGS,
    TOKENIZER,
    check_config,
    last_checkpoint,
    read_settings,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.folders.run_lock import is_first_of_job
from flashtrain.mode import mode_of
from flashtrain.run.fitting import fit
from flashtrain.settings.aliases import current_value
from flashtrain.settings.command_line import FOLDER
from flashtrain.settings.settings import Settings
from flashtrain.spec import Task, TrainingSetup, task_of
from flashtrain.tasks.batching import memory_columns
from flashtrain.training.checkpoints import LAST, check_resumable, read_checkpoint
from flashtrain.training.hardware import Hardware, versions


def planned_row(settings: Settings, hardware: Hardware, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the part of the summary row that is known before the run. `overrides`:
    the command line's words."""
    common = {"attention": hardware.attention, "precision": hardware.precision}
    mode = mode_of(settings)
    measures = mode is not None and mode.measures
    trained = {} if measures else {**task_of(settings).columns(settings), **common}
    return {
        "recipe": settings.recipe,
        "date": time.strftime("%Y-%m-%d"),
        **trained,
        "device": hardware.name,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "overrides": " ".join(word for word in overrides if not word.startswith(FOLDER)),
    }


def check_same_model(
    checkpoint: Path, saved: Mapping[str, Any], description: dict[str, Any]
) -> None:
    """Raise UserError, which lists the differences, if a checkpoint (`saved`) is not
    of the described model."""
    notes = saved.get("flashtrain", {})
    here = {"name": description["name"], **description["shape"]}
    there = {"name": current_value("model.name", notes.get("name")), **notes.get("shape", {})}
    differing = [key for key in here if here[key] != there.get(key)]
    if differing:
        parts = ", ".join(f"{key} is {there.get(key)}, expected {here[key]}" for key in differing)
        raise UserError(
            f"{checkpoint} is a checkpoint of another model: {parts}. Use the settings of its run."
        )


def checkpoint_to_resume(
    settings: Settings, folder: Path, description: dict[str, Any]
) -> Path | None:
    """Return the `last_checkpoint`, from which to resume; None if the run or stage begins anew.

    Raises UserError if the checkpoint is of another model, holds weights only, or is at
    the last step already.
    """
    if (checkpoint := last_checkpoint(settings, folder)) is None:
        return None
    saved = read_checkpoint(checkpoint, mmap=True, checked=True)
    check_same_model(checkpoint, saved, description)
    made, steps = check_resumable(saved, checkpoint), settings.trainer.steps
    # An empty row would overwrite that of a finished run. A run that died between its last step and
    # its summary is not FINISHED: it resumes, and makes its summary.
    run, last = checkpoint.parent.parent, checkpoint.name == LAST
    row = read_summary(run)
    finished = row.get("status") == FINISHED
    if made > steps or (made == steps and finished):
        name = "the last stage's steps" if "stage" in description else "trainer.steps"
        raise UserError(
            f"{checkpoint} is of step {made:,}, and {name}={steps}: nothing is left to train. "
            f"Set {name} above {made}, or start a new run without resume=."
        )
    reason, here, there = row.get("stopped_early"), settings.trainer, read_settings(run).trainer
    more = (here.early_stopping_patience or math.inf) > (there.early_stopping_patience or 0)
    more |= here.early_stopping_monitor != there.early_stopping_monitor
    if finished and last and reason and not more:
        raise UserError(
            f"{run} ended early at step {made:,}, since {reason}: nothing is left to train. Set "
            f"trainer.early_stopping_patience above {here.early_stopping_patience}, or start a new "
            "run without resume=."
        )
    longer = ", which had finished" if finished and last else ""
    back = not last and run.resolve() == folder.resolve()
    replaced = ": later metrics, checkpoints and the summary are replaced" if back else ""
    line = f"resuming from {checkpoint}{longer}, at step {made:,} of {steps:,}{replaced}"
    say(line, level=logging.WARNING if back else logging.INFO)
    return checkpoint


def train(
    task: Task,
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    *,
    overrides: Sequence[str],
    started: float,
) -> dict[str, Any]:
    """Train in `folder`, and return the summary row.

    Args:
        task, settings, hardware: what to train, how, and on which device.
        folder: the run's folder.
        overrides: the command line's words, for the row.
        started: time.monotonic() at the command's start.

    Raises:
        UserError: a mistake that the user can correct.
        Stopped: after a signal, or after trainer.max_minutes.
        OutOfMemory: the device ran out of memory.
    """
    pl.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision("high")
    stored: dict[str, Any] = {}  # in every checkpoint
    stores = LambdaCallback(on_save_checkpoint=lambda trainer, task, saved: saved.update(stored))
    row = read_summary(folder)  # the result if no training is left

    def finished_row(prepared: TrainingSetup, trainer: pl.Trainer) -> dict[str, Any]:
        return {
            **planned_row(settings, hardware, overrides),
            "status": FINISHED,
            **prepared.row(trainer),
            "stopped_early": getattr(trainer.early_stopping_callback, "reason", None),
            "held_out_samples": getattr(prepared.data, "held_out_samples", None),
            **memory_columns(prepared.batching),
            "seconds": round(time.monotonic() - started, 1),
        }

    for number, prepared in enumerate(task.trainings(settings, hardware, folder, overrides)):
        stage = prepared.stage
        own = stage.settings if stage else settings
        resumed = stage.resumed if stage else None
        resumed = resumed or checkpoint_to_resume(own, folder, prepared.description)
        if number == 0:
            if resumed is not None:
                check_config(resumed, read_checkpoint(resumed, mmap=True))
                if prepared.tokenizer is not None:
                    check_same_tokens(prepared.tokenizer, resumed.parent.parent / TOKENIZER)
            # All of the user's input has been checked: from here on the folder is this run's.
            if is_first_of_job():
                stored[SETTINGS] = write_config(asdict(settings), folder)
                if prepared.tokenizer is not None:
                    prepared.tokenizer.save(folder / TOKENIZER)
                write_summary(
                    folder, {**planned_row(settings, hardware, overrides), "status": RUNNING}
                )
        for line in prepared.lines:
            say(line)
        prepared.callbacks = [*prepared.callbacks, stores]
        finish = partial(finished_row, prepared)
        row = fit(prepared, own, hardware, folder, resumed=resumed, started=started, finish=finish)
    return row
