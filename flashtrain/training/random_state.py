"""The state of the random generators in checkpoints, where Lightning saves none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from flashtrain.announce import say

KEY = "random_states"


class RandomState(pl.Callback):
    """Saves the state of each rank's random generators in every checkpoint, and restores
    it when a run resumes.

    The generators are Python's, NumPy's, torch's on the CPU and, on a GPU, the device's, from which
    dropout draws. Their states are saved as tensors and integers, which load without running code.
    If the number of ranks or the kind of device has changed, the generators are seeded from the
    run's seed and the step: another stream of numbers, but deterministic. (Lightning 2.6.6 saves no
    generators: a resumed run has other dropout.) Each rank has its own states and draws its own
    numbers; numbers that ranks must share are broadcast or computed from the seed.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self._loaded: list[dict[str, Any]] | None = None
        self._pending = False
        # The last completed step, and the generators' states after it.
        self._ended: tuple[int, Any] = (-1, None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The first rank goes on with the run's seed, as one device does.
        if trainer.global_rank and not self._pending:
            _seed(self.seed, trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step != self._ended[0]:
            self._ended = trainer.global_step, _states(trainer.strategy.root_device)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        step, here = self._ended
        # The step that an exception interrupted has drawn numbers already; it is repeated
        # when the run resumes.
        if not (trainer.interrupted and step == trainer.global_step):
            here = _states(trainer.strategy.root_device)
        states: list[Any] = [here]
        # Every rank dumps a checkpoint; the first one writes it.
        if trainer.world_size > 1 and dist.is_initialized():
            states = [None] * trainer.world_size
            dist.all_gather_object(states, here)
        checkpoint[KEY] = states

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(KEY)
        self._pending = True

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not self._pending:  # restored this late because a missing validation comes first
            return
        self._pending = False
        device, states = trainer.strategy.root_device, self._loaded or []
        kinds = {"python", "numpy", "cpu", *([device.type] if device.type != "cpu" else [])}
        if len(states) == trainer.world_size and all(set(state) == kinds for state in states):
            _restore(states[trainer.global_rank], device)
            return
        say(
            "the checkpoint was saved on other devices: "
            "random generators (dropout) are seeded from seed and step"
        )
        _seed(self.seed + trainer.global_step, trainer)


def _seed(number: int, trainer: pl.Trainer) -> None:
    drawn = (number + 1_000_003 * trainer.global_rank) % 2**32
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)


def _states(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's random generators as tensors and plain values, for a
    checkpoint."""
    version, words, gauss = random.getstate()
    drawn: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = drawn
    states = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "cpu": torch.get_rng_state(),
    }
    return states if device.type == "cpu" else {**states, "cuda": torch.cuda.get_rng_state(device)}


def _restore(states: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
