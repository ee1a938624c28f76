"""One training of any task: what the task prepared, in a run folder, to the summary row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.announce import say
from flashtrain.folders.run_folder import FINISHED, RUNNING, TOKENIZER, write_config, write_summary
from flashtrain.run.fitting import fit
from flashtrain.run.resume import checkpoint_to_resume
from flashtrain.run.summary import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.spec import Task
from flashtrain.tasks.batching import memory_columns
from flashtrain.training.hardware import Hardware


def train(
    task: Task, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Train as the settings say, in `folder`, and return the summary row.

    started: time.time() at the command's start. Raises UserError for what the user can mend, Stopped after a signal or
    at the end of trainer.max_minutes, OutOfMemory.
    """
    if task.trains_itself:
        return task.train(settings, hardware, folder, overrides=overrides, started=started)
    pl.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision("high")
    prepared = task.prepare(settings, hardware)
    resumed = checkpoint_to_resume(settings, folder, prepared.description, prepared.defaults)
    for line in prepared.said:
        say(line)

    # Everything that a user can have got wrong is checked: from here on the folder is this run's.
    write_config(settings, folder)
    if prepared.tokenizer is not None:
        prepared.tokenizer.save(folder / TOKENIZER)
    write_summary(folder, {**planned_row(settings, hardware, overrides), "status": RUNNING})

    def finish(trainer: pl.Trainer) -> dict[str, Any]:
        return {
            **planned_row(settings, hardware, overrides),
            "status": FINISHED,
            **prepared.row(trainer),
            **memory_columns(prepared.batching),
            "seconds": round(time.time() - started, 1),
        }

    return fit(
        settings,
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
        monitor=prepared.monitor,
        mode=prepared.mode,
        callbacks=prepared.callbacks,
    )
