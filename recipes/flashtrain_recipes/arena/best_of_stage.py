"""The weights of a stage's best validation, from which the next stage starts."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from flashtrain.tasks.training_task import metric


class BestOfStage(pl.Callback):
    """Keeps the weights of the best validation of a fit; `restore` puts them back where the latest one was worse.

    A stage whose learning rate stays high can fall back, to chance even; what it had learned is not lost on the next.
    The weights travel in the checkpoint, so a run that is resumed, from a file carried to another machine too, starts
    its next stage as an uninterrupted one. monitor: the name that is logged; mode: whether its "max" or "min" is best.
    """

    def __init__(self, model: nn.Module, monitor: str, mode: str) -> None:
        super().__init__()
        self.model, self.monitor, self.sign = model, monitor, 1 if mode == "max" else -1
        self.score: float | None = None
        self.step = 0
        self._latest: float | None = None
        self._weights: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        score = metric(trainer, self.monitor)
        if trainer.sanity_checking or score is None:
            return
        self._latest = score
        if self.score is None or self.sign * score > self.sign * self.score:
            self.score, self.step = score, trainer.global_step
            self._weights = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def restore(self) -> bool:
        """Whether the model has got weights back that were better than its latest."""
        if self.score is None or self._latest is None or self.score == self._latest:
            return False
        with torch.no_grad():
            self.model.load_state_dict(self._weights)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "step": self.step, "latest": self._latest, "weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.score, self.step, self._latest = state_dict["score"], state_dict["step"], state_dict["latest"]
        self._weights = dict(state_dict["weights"])
