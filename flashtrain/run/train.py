"""One run of any task: the trainings that the task prepares, one after another in a run folder, to the summary row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.announce import say
from flashtrain.folders.run_folder import FINISHED, RUNNING, TOKENIZER, read_summary, write_config, write_summary
from flashtrain.run.fitting import fit
from flashtrain.run.resume import checkpoint_to_resume
from flashtrain.run.summary import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared, Task
from flashtrain.tasks.batching import memory_columns
from flashtrain.training.hardware import Hardware


def train(
    task: Task, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Train as the settings say, in `folder`, and return the summary row.

    started: time.time() at the command's start. Raises UserError for what the user can mend, Stopped after a signal or
    at the end of trainer.max_minutes, OutOfMemory.
    """
    pl.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision("high")
    row = read_summary(folder)  # stays where nothing is left to train
    for number, prepared in enumerate(task.trainings(settings, hardware, folder, overrides)):
        part = prepared.part
        resumed = (
            part.resumed if part else checkpoint_to_resume(settings, folder, prepared.description, prepared.defaults)
        )
        if number == 0:
            # Everything that a user can have got wrong is checked: from here on the folder is this run's.
            write_config(settings, folder)
            if prepared.tokenizer is not None:
                prepared.tokenizer.save(folder / TOKENIZER)
            write_summary(folder, {**planned_row(settings, hardware, overrides), "status": RUNNING})
        for line in prepared.said:
            say(line)
        row = _fit(prepared, settings, hardware, folder, resumed=resumed, overrides=overrides, started=started)
    return row


def _fit(
    prepared: Prepared,
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    *,
    resumed: Path | None,
    overrides: list[str],
    started: float,
) -> dict[str, Any]:
    """Train what is prepared, and return the row of the run up to its end."""

    def finish(trainer: pl.Trainer) -> dict[str, Any]:
        return {
            **planned_row(settings, hardware, overrides),
            "status": FINISHED,
            **prepared.row(trainer),
            **memory_columns(prepared.batching),
            "seconds": round(time.time() - started, 1),
        }

    part = prepared.part
    return fit(
        part.settings if part else settings,
        hardware,
        folder,
        prepared.task,
        prepared.data,
        prepared.throughput,
        resumed=resumed,
        started=started,
        finish=finish,
        batching=prepared.batching,
        advice=prepared.advice,
        logs=part.logs if part else None,
        goes_on=part.goes_on if part else False,
        settle=part.settle if part else None,
        monitor=prepared.monitor,
        mode=prepared.mode,
        callbacks=prepared.callbacks,
    )
