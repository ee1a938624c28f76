"""Give a resumed run the learning rates of its own schedule, and its own numbers of the optimizer,
where Lightning restores those of the run that it continues."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytorch_lightning as pl

# What settings give a group of parameters; other entries may be an optimizer's state.
NAMES = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum")


class RatesOfThisRun(pl.Callback):
    """Gives a resumed run the learning rates of its own schedule, and its optimizer's numbers
    (NAMES), not those of the run that saved the checkpoint.

    If the earlier run was planned shorter, its schedule may be at its end. This run's schedule is
    therefore made anew and stepped up to the checkpoint's step, unless it follows a metric
    (ReduceLROnPlateau).
    """

    _new: tuple[Any, ...] = ()  # each schedule, its state, and its optimizer's numbers

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Called after optimizers and schedules are made, and before their states are restored.
        schedules: list[Any] = [
            one.scheduler for one in trainer.lr_scheduler_configs if not one.reduce_on_plateau
        ]
        self._new = tuple(
            (one, copy.deepcopy(one.state_dict()), _numbers(one)) for one in schedules
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path is None:
            return
        for schedule, state, numbers in self._new:
            done = schedule.last_epoch
            schedule.load_state_dict(state)
            # MasterWeights in host memory load the restored state only now.
            schedule.optimizer.state_dict()
            for group, own in zip(schedule.optimizer.param_groups, numbers, strict=True):
                group.update(own)
            with warnings.catch_warnings():  # "lr_scheduler.step() before optimizer.step()"
                warnings.simplefilter("ignore")
                for _ in range(done):
                    schedule.step()


def _numbers(schedule: Any) -> list[dict[str, Any]]:
    groups = schedule.optimizer.param_groups
    return [
        {name: copy.deepcopy(group[name]) for name in NAMES if name in group} for group in groups
    ]
