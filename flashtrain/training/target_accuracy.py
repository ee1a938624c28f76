"""Stopping a run once a held-out figure is good enough, and saying how long that took."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytorch_lightning as pl

from flashtrain.errors import UserError

log = logging.getLogger(__name__)


class StopAtTarget(pl.Callback):
    """Ends training at the first validation at which a logged figure is at least `target`.

    metric: the name that it is logged under, on every rank the same. seconds: from the start of training to that
    validation's end, None until then; a resumed run counts the parts before it too. UserError: no target in (0, 1].
    """

    def __init__(self, target: float, metric: str = "validation_accuracy") -> None:
        if not 0 < target <= 1:
            raise UserError(f"target_accuracy {target:g}. Possible: a share above 0, and at most 1.")
        self.target = target
        self.metric = metric
        self.seconds: float | None = None
        self._before = 0.0
        self._begun: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        value = trainer.callback_metrics.get(self.metric)
        if trainer.sanity_checking or self._begun is None or value is None or self.seconds is not None:
            return
        if float(value) >= self.target:
            self.seconds = self._elapsed()
            log.info(
                "%s %.4f reached its target %g after %d steps and %.1f s",
                self.metric,
                float(value),
                self.target,
                trainer.global_step,
                self.seconds,
            )
            trainer.should_stop = True

    def _elapsed(self) -> float:
        return self._before + (0.0 if self._begun is None else time.monotonic() - self._begun)

    def state_dict(self) -> dict[str, Any]:
        """Seconds of training so far."""
        return {"seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from an earlier part of the run."""
        self._before = float(state_dict["seconds"])
