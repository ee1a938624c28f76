"""What a checkpoint is asked before a run goes on from it: it may have been damaged, or written by anybody.

Random numbers go on where a run stopped: the generators of every rank travel in its checkpoints.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import sys
import traceback
import warnings
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from flashtrain.errors import UserError
from flashtrain.files.foreign_files import is_count

DEEPEST = 30
# Where torch's and Lightning's own reading of a state raises, in words of its own.
_RESTORING = ("load_state_dict", "on_load_checkpoint", "_load_combined_loader_states", "set_optimizer_state_dict")
_RESTORING_FILE = "checkpoint_connector.py"


def check_resumable(saved: Mapping[str, Any], checkpoint: Path) -> int:
    """The optimiser steps that the checkpoint has made. Raises UserError unless a run can go on from it.

    Looks at what is there and of which kind, not at the weights.
    """

    def damaged(what: str) -> UserError:
        return UserError(f"{checkpoint} is damaged, or no training's checkpoint: {what}.")

    step: Any = saved.get("global_step")
    if not is_count(step):
        raise damaged(f"its global_step is {_short(step)}, not a number of steps")
    state = saved.get("state_dict")
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise damaged("its state_dict holds no weights")
    missing = [
        words for key, words in (("optimizer_states", "optimiser"), ("lr_schedulers", "schedule")) if not saved.get(key)
    ]
    if missing:
        raise UserError(
            f"{checkpoint} has no state of the {' and '.join(missing)}: a run that went on from it would be another "
            f"one. Its weights can be trained further: weights={checkpoint}, without resume=."
        )
    for key in ("optimizer_states", "lr_schedulers"):
        if not isinstance(saved[key], list) or not all(isinstance(entry, dict) for entry in saved[key]):
            raise damaged(f"its {key} are of another kind")
    callbacks = saved.get("callbacks", {})
    if not isinstance(callbacks, dict) or not all(isinstance(entry, dict) for entry in callbacks.values()):
        raise damaged("its callbacks are of another kind")
    loops = saved.get("loops")
    if not isinstance(loops, dict) or not isinstance(loops.get("fit_loop"), dict):
        raise damaged("it does not say where its training stood")
    odd = _odd_count(loops, "loops")
    if odd is not None:
        raise damaged(f"{odd} is no count")
    return step


def raised_while_restoring(error: BaseException) -> bool:
    """Whether an exception was raised by reading a checkpoint's state back, and not by training."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in _RESTORING or frame.filename.endswith(_RESTORING_FILE) for frame in frames)


class CheckRestored(pl.Callback):
    """Looks once, before a resumed run's first step, at what optimiser and schedule were given: finite numbers and
    tensors of the weights' shapes, entries of the kinds that a new schedule has, and the step that the checkpoint
    names. Raises UserError. torch's own load_state_dict takes anything, and fails in the step."""

    _step: Any = None
    _new: tuple[tuple[str, dict[str, Any]], ...] = ()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Between the making of optimisers and schedules and the restoring of their states.
        self._new = tuple((name, copy.deepcopy(entries)) for name, entries, _ in _entries(trainer))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._step = checkpoint.get("global_step")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path is None:
            return
        if trainer.global_step != self._step:
            raise UserError(
                f"{trainer.ckpt_path} is damaged: it says step {self._step}, and its loops step {trainer.global_step}."
            )
        for (name, new), (_, found, kind) in zip(self._new, _entries(trainer), strict=True):
            odd = _odd_entry(found, new, kind)
            if odd is not None:
                raise UserError(f"{trainer.ckpt_path} is damaged: the {name}'s {odd}.")
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._check_state(parameter, optimizer.state.get(parameter, {}), str(trainer.ckpt_path))

    def _check_state(self, parameter: torch.Tensor, state: Any, where: str) -> None:
        for name, value in state.items() if isinstance(state, dict) else [("state", state)]:
            fits = isinstance(value, torch.Tensor) and (value.numel() == 1 or value.shape == parameter.shape)
            fits = fits or (name == "step" and _is_finite(value))  # some optimisers count in plain numbers
            if not fits:
                raise UserError(
                    f"{where} is damaged: the optimiser's {name} of a weight of shape {tuple(parameter.shape)} is "
                    f"{_short(value)}."
                )


def _entries(trainer: pl.Trainer) -> list[tuple[str, dict[str, Any], type]]:
    """The settings of every group of the optimisers and the state of every schedule: whose, the entries, its class."""
    groups = [
        ("optimiser", {name: value for name, value in group.items() if name != "params"}, dict)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
    return groups + [("schedule", schedule.state_dict(), type(schedule)) for schedule in schedules]


def _odd_entry(found: Mapping[str, Any], new: Mapping[str, Any], kind: type) -> str | None:
    """The entry of a restored state that is of another kind than in a new one, in words; None where all fit."""
    for name in new:
        if name not in found:
            return f"{name} is missing"
    for name, value in found.items():
        if name not in new:
            if hasattr(kind, str(name)):  # what was restored hides a method
                return f"state has an entry {name!r:.60}"
        elif not (is_count(value) if name in ("last_epoch", "_step_count") else _alike(value, new[name])):
            return f"{name} is {_short(value)}"
    return None


def _alike(value: Any, new: Any) -> bool:
    """Whether a value could stand in a new one's place: a finite number, a list of as many, or of the same type."""
    if isinstance(new, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(new) and all(map(_alike, value, new))
    if new is None or isinstance(new, bool):  # fused, say, is None on one device and true on another
        return value is None or isinstance(value, bool) or (new is None and _is_finite(value))
    if not isinstance(new, (Real, torch.Tensor)):
        return type(value) is type(new)
    return not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: Any) -> bool:
    """Whether it is one finite number, as a tensor may be; a number that no float holds is none."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(torch.isfinite(value).all())
    return isinstance(value, Real) and abs(value) < sys.float_info.max  # type: ignore[operator]


def _odd_count(value: Any, name: str, depth: int = 0) -> str | None:
    """The name of the first entry that is neither a count nor a plain word; None where all are."""
    if depth > DEEPEST:
        return name
    if isinstance(value, dict):
        entries = [(f"{name}.{key}", entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)):
        entries = [(name, entry) for entry in value]
    else:
        fine = value is None or isinstance(value, (bool, str)) or is_count(value)
        return None if fine else name
    for path, entry in entries:
        odd = _odd_count(entry, path, depth + 1)
        if odd is not None:
            return odd
    return None


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class RatesOfThisRun(pl.Callback):
    """Gives a run that goes on the learning rates that its own schedule has from this step on.

    What a checkpoint has of schedule and rates is of the earlier run: where that was shorter, its rates are at their
    end. So the new schedule is stepped to where the checkpoint stands, unless it follows a figure (ReduceLROnPlateau).
    """

    _new: tuple[Any, ...] = ()  # each schedule, its state, and the rates of its optimiser's groups

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Between the making of optimisers and schedules and the restoring of their states.
        schedules: list[Any] = [one.scheduler for one in trainer.lr_scheduler_configs if not one.reduce_on_plateau]
        self._new = tuple((one, copy.deepcopy(one.state_dict()), _rates(one)) for one in schedules)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path is None:
            return
        for schedule, state, rates in self._new:
            done = schedule.last_epoch
            schedule.load_state_dict(state)
            schedule.optimizer.state_dict()  # MasterWeights in host memory take up what was restored only now
            for group, own in zip(schedule.optimizer.param_groups, rates, strict=True):
                group.update(own)
            with warnings.catch_warnings():  # that the optimiser has made no step
                warnings.simplefilter("ignore")
                for _ in range(done):
                    schedule.step()


def _rates(schedule: Any) -> list[dict[str, Any]]:
    groups = schedule.optimizer.param_groups
    return [{name: copy.deepcopy(group[name]) for name in ("lr", "initial_lr")} for group in groups]


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
        self._ended: tuple[int, Any] = (-1, None)  # the last step that was completed, and the generators there

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._ended[0]:
            self._ended = trainer.global_step, _drawn(trainer.strategy.root_device)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        step, drawn = self._ended
        # After an exception the step that it ended has drawn some numbers, and is made again.
        here = _states(
            drawn if trainer.interrupted and step == trainer.global_step else _drawn(trainer.strategy.root_device)
        )
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


def _drawn(device: torch.device) -> tuple[Any, ...]:
    """The generators' states as they come, which takes the least time."""
    states = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def _states(drawn: tuple[Any, ...]) -> dict[str, Any]:
    (version, words, gauss), (kind, keys, position, has_gauss, cached), *of_torch = drawn
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        **dict(zip(("cpu", "cuda"), of_torch, strict=False)),
    }


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
