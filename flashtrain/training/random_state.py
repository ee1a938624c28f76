"""Random numbers go on where a run stopped: the generators of every rank travel in its checkpoints."""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from flashtrain.errors import UserError

log = logging.getLogger(__name__)

KEY = "random_states"


class RandomState(pl.Callback):
    """Keeps the state of each rank's generators in every checkpoint; a resumed run's first step draws from it.

    Python's, NumPy's, torch's on the CPU and, on a GPU, its device's: what dropout draws from. They are written as
    tensors and whole numbers, which load without running code. Where the ranks or the kind of device are not those of
    the checkpoint, or it has no states, the generators are seeded from the run's seed and the step: another stream of
    numbers, yet the same each time. seed: the run's. Lightning has nothing for it.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self._loaded: list[dict[str, Any]] | None = None
        self._pending = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        here = _states(trainer.strategy.root_device)
        states: list[Any] = [here]
        if trainer.world_size > 1 and dist.is_initialized():  # every rank dumps a checkpoint; the first one writes it
            states = [None] * trainer.world_size
            dist.all_gather_object(states, here)
        checkpoint[KEY] = states

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get(KEY)
        self._loaded = states if isinstance(states, list) else None
        self._pending = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._pending:  # as late as this: a validation that was still due came first
            return
        self._pending = False
        device = trainer.strategy.root_device
        states, self._loaded = self._loaded, None
        kinds = {"python", "numpy", "cpu", *([device.type] if device.type != "cpu" else [])}
        known = isinstance(states, list) and all(isinstance(state, dict) and set(state) == kinds for state in states)
        if known and len(states or ()) == trainer.world_size:
            _restore((states or [])[trainer.global_rank], device)
            return
        if trainer.is_global_zero:
            why = "was written by other devices" if known else "has no random states of this kind of device"
            log.info("the checkpoint %s: what is random (dropout) is drawn from the seed and the step", why)
        _seed(self.seed, trainer.global_step)


def _states(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore(states: dict[str, Any], device: torch.device) -> None:
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint's random states are damaged: {error}.") from error


def _seed(seed: int, step: int) -> None:
    """Seed all generators from both numbers, alike on every rank, as a run's seed is."""
    drawn = int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest(), "big")
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)
