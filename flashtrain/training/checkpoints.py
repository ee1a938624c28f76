"""Checkpoints that survive: written whole or not at all, read without running code, found again for resuming.

A run folder's `checkpoints/` holds `last.ckpt` (every N optimiser steps and at the end; what resuming continues from)
and `best.ckpt` (lowest validation loss; without the optimiser's states). Both are single files, or folders of what
every rank wrote (sharded.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from pytorch_lightning.trainer.call import _call_callbacks_on_save_checkpoint

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import FULL, os_errors
from flashtrain.training.loggers import MetricsFile
from flashtrain.training.steps import OptimizerStepCounter

LAST = "last.ckpt"
BEST = "best.ckpt"
_PATH_KEYS = ("best_model_path", "kth_best_model_path", "last_model_path")  # of ModelCheckpoint's state
STATES_OF_8_BITS = "torchao.optim.subclass_8bit.OptimState8bit"
PARTIAL = ".partial"  # ends the name of a file that is still being written


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their place and moved there when complete.

    A run killed while writing leaves the previous file as it was (and a `*.partial` file, which the next write
    replaces); so does a full disk, which is a UserError. Reading always uses weights_only=True: a checkpoint cannot
    run code. Give it to the Trainer: `Trainer(plugins=[AtomicCheckpointIO()])`.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise UserError("checkpoints are written to local files: storage_options cannot be used")
        save_atomically(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = read_checkpoint(path, map_location=map_location, optimizers=True)
        rebuild_paths(checkpoint, Path(path).absolute().parent)
        return checkpoint


def rebuild_paths(checkpoint: dict[str, Any], folder: Path) -> None:
    """Let no path in a loaded checkpoint's callbacks be believed: Lightning's ModelCheckpoint deletes the file that a
    better one replaces, wherever its state says that it lies. Of each path the last name is kept, as a checkpoint in
    `folder`, the checkpoint's own, where there is one of that name."""

    def here(path: Any) -> str:
        name = Path(path).name if isinstance(path, str) and "\0" not in path else ""
        return str(folder / name) if name.endswith(".ckpt") and checkpoint_exists(folder / name) else ""

    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if not isinstance(state, dict) or not any(key in state for key in _PATH_KEYS):
            continue
        for key in _PATH_KEYS:
            if key in state:
                state[key] = here(state[key])
        if "dirpath" in state:
            state["dirpath"] = str(folder)
        scores = state.get("best_k_models")
        if "best_k_models" in state:
            known = scores.items() if isinstance(scores, dict) else ()
            state["best_k_models"] = {here(path): score for path, score in known if here(path)}


def save_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """torch.save to a name beside `path`, flushed to the disk, then moved to `path` in one step.

    Raises UserError where the disk is full or the folder cannot be written; `path` is then as it was.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _replace(partial, path)
    except (OSError, RuntimeError) as problem:
        cause = next(os_errors(problem), None)
        if cause is None:
            raise
        with contextlib.suppress(OSError):
            partial.unlink()
        kept = f"the earlier {path.name} is intact" if path.exists() else "no earlier one existed"
        if cause.errno in FULL:
            raise UserError(f"the disk is full: could not write checkpoint {path}; {kept}") from problem
        raise UserError(f"could not write checkpoint {path}: {cause.strerror or cause}; {kept}") from problem


def _replace(file: Path, path: Path) -> None:
    """Move a whole checkpoint file to its place, also where a run whose ranks wrote a folder had its own there."""
    if not path.is_dir() or not checkpoint_exists(path):
        file.replace(path)
        return
    earlier = path.with_name(f"{path.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    path.rename(earlier)
    file.replace(path)
    shutil.rmtree(earlier, ignore_errors=True)


def checkpoint_exists(path: Path) -> bool:
    """Whether there is a checkpoint of this name that may be read, a file or a folder that is whole."""
    try:
        if not path.is_dir():
            return path.is_file()
        from flashtrain.training.sharded import is_sharded  # here and below: where there is such a folder

        return is_sharded(path)
    except OSError:
        return False


def read_checkpoint(
    path: str | Path, map_location: Any = "cpu", *, mmap: bool = False, optimizers: bool = False
) -> dict[str, Any]:
    """The dictionary in a checkpoint, by torch.load with weights_only=True. mmap: read tensors when they are used.

    Of a folder of shards the weights are put together in host memory, with `optimizers` the optimisers' states too;
    what is not (with mmap neither) has its shape alone, on the meta device.
    Raises UserError where it is missing, damaged, no checkpoint, or holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path, map_location, mmap)
    from flashtrain.training import sharded

    folder = sharded.current(path)
    plain = _read_file(folder / sharded.PLAIN, "cpu", False)
    if mmap:
        return plain
    with readable_checkpoint_errors(folder / sharded.PLAIN, path):
        checkpoint = sharded.whole(folder, plain, sharded.PARTS if optimizers else sharded.PARTS[:1])
        if optimizers and checkpoint.get("optimizer_states"):
            checkpoint["optimizer_states"] = [sharded.numbered(one) for one in checkpoint["optimizer_states"]]
    return checkpoint


def _read_file(path: Path, map_location: Any, mmap: bool) -> dict[str, Any]:
    with readable_checkpoint_errors(path):
        try:
            checkpoint = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
        except pickle.UnpicklingError:
            if torch.serialization.get_unsafe_globals_in_checkpoint(path) != [STATES_OF_8_BITS]:
                raise
            import torchao.optim  # noqa: F401 - from then on torch reads tensors of this one class of its

            checkpoint = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint")
    return checkpoint


@contextlib.contextmanager
def readable_checkpoint_errors(path: Path, named: Path | None = None) -> Iterator[None]:
    """Turns what torch.load(path, weights_only=True) raises inside the `with` into one-line UserErrors.

    named: the folder of shards, to name, whose plain values the file has; what reading the shards raises is turned too.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a checkpoint file; give one of its .ckpt files")
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}{_nearby(path)}")
    try:
        _check_archive(path)
        path = named or path
        yield
    except UserError:
        raise
    except pickle.UnpicklingError as problem:
        raise UserError(
            f"checkpoint {path} is refused: it is damaged, or holds more than tensors and plain values, and reading it"
            " could run code"
        ) from problem
    except PermissionError as problem:
        raise UserError(f"checkpoint {path} cannot be read: {problem.strerror}") from problem
    except Exception as problem:  # reading a changed file, torch lets through whatever goes wrong in it
        raise UserError(f"checkpoint {path} is damaged or incomplete ({_first_line(problem)})") from problem


def _check_archive(path: Path) -> None:
    """UserError unless the file is an archive as torch.save writes it: every entry as it is, none compressed, together
    no larger than the file. (torch unpacks compressed ones: gigabytes of zeros from a small file.)

    Raises zipfile's errors for a damaged one.
    """
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise UserError(f"{path} is no checkpoint: torch.save writes a zip archive, and this is none")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        stored = all(
            entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size for entry in entries
        )
        if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise UserError(f"checkpoint {path} is refused: entries of it are compressed, or claim more than it holds")
        for entry in entries:
            # Of all that weights_only lets a file make, this alone takes memory that the file does not have.
            if entry.filename.endswith("/data.pkl") and b"bytearray" in archive.read(entry):
                raise UserError(f"checkpoint {path} is refused: it holds more than tensors and plain values")


def read_weights(path: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint, on the CPU, for evaluating, generating or exporting.

    prefix: the attribute under which the LightningModule keeps the wanted module ("model."); only its weights are
    returned, without it. Names that torch.compile changed are given back their own. Raises UserError as
    `read_checkpoint`, and where the file holds no weights under the prefix.
    """
    return weights_in(read_checkpoint(path), path, prefix)


def weights_in(checkpoint: dict[str, Any], path: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """As `read_weights`, for a checkpoint that has been read from `path` already."""
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UserError(f"{path} holds no model weights (no 'state_dict')")
    plain = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    weights = {name[len(prefix) :]: value for name, value in plain.items() if name.startswith(prefix)}
    if not weights:
        raise UserError(
            f"{path} holds no weights whose names begin with '{prefix}'; it has {', '.join(list(plain)[:3])} ..."
        )
    return weights


def find_resumable(folder: str | Path) -> Path | None:
    """The newest complete `last.ckpt` in a folder or anywhere below it; None where there is none.

    A file that is not a whole checkpoint archive (cut off by a copy, say) is passed over.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    found = [path for path in folder.rglob(LAST) if _is_whole(path)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def checkpoint_callbacks(
    folder: str | Path,
    every_n_steps: int | None = None,
    monitor: str | None = "validation_loss",
    mode: str = "min",
) -> list[pl.Callback]:
    """The checkpoint rules of a run: [best (where `monitor` is given), last].

    every_n_steps: optimiser steps between two writes of last.ckpt; None writes it at the end only. mode: whether the
    lowest ("min") or the highest ("max") of what is monitored is best.
    """
    callbacks: list[pl.Callback] = []
    if monitor is not None:
        callbacks.append(
            BestCheckpoint(
                dirpath=folder,
                filename=Path(BEST).stem,
                monitor=monitor,
                mode=mode,
                save_top_k=1,
                save_on_train_epoch_end=False,
                enable_version_counter=False,
                auto_insert_metric_name=False,
            )
        )
    callbacks.append(SaveLast(folder, every_n_steps))
    return callbacks


def keep_if_best(trainer: pl.Trainer) -> None:
    """After a validation that followed the fit, let best.ckpt hold these weights where they are the best so far.

    Every rank must call it, with what was validated the same on all.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, BestCheckpoint):
            callback.keep_if_best(trainer)


class BestCheckpoint(ModelCheckpoint):
    """ModelCheckpoint for one best.ckpt that is right after a fit's end and after a resumption too. It is there for its
    weights: the optimiser's states, twice as large, are in last.ckpt alone.

    last.ckpt may know less than best.ckpt does: a validation that follows the fit comes after it was written. So a run
    that goes on takes the score to beat from best.ckpt. (A stage that has not validated yet has nothing to beat.)
    Its state is that score alone: where best.ckpt lies is known, and a path in a checkpoint is not believed.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        score = _score(state_dict.get("best_model_score"))
        if score is not None and checkpoint_exists(self._path):
            self._holds(score)

    def keep_if_best(self, trainer: pl.Trainer) -> None:
        """As the function of this name."""
        score = trainer.callback_metrics.get(str(self.monitor))
        if score is not None and self.check_monitor_top_k(trainer, score):
            self._holds(score)
            self._save_checkpoint(trainer, str(self._path))

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        # Lightning's save_weights_only leaves out all that callbacks save too, and so the score to beat.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
        checkpoint["callbacks"] = {self.state_key: self.state_dict()}
        _call_callbacks_on_save_checkpoint(trainer, checkpoint)
        trainer.strategy.save_checkpoint(checkpoint, filepath)
        trainer.strategy.barrier("BestCheckpoint")
        self._last_global_step_saved = trainer.global_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.best_model_score is None or not checkpoint_exists(self._path):
            return
        held = self._held()
        if held is not None and self.check_monitor_top_k(trainer, held):
            self._holds(held)

    def _held(self) -> torch.Tensor | None:
        """The score that best.ckpt says it is of; None where it cannot be read: then it is no loss."""
        with contextlib.suppress(UserError):
            # Mapped, for of all its weights nothing is read.
            state = read_checkpoint(self._path, mmap=True).get("callbacks")
            own = state.get(self.state_key) if isinstance(state, dict) else None
            return _score(own.get("best_model_score")) if isinstance(own, dict) else None
        return None

    def _holds(self, score: torch.Tensor) -> None:
        """Remember that best.ckpt is of this score."""
        path = str(self._path)
        self.best_model_path = self.kth_best_model_path = path
        self.best_model_score = self.kth_value = self.current_score = score
        self.best_k_models = {path: score}

    @property
    def _path(self) -> Path:
        return Path(self.dirpath or "") / BEST


class SaveLast(Checkpoint):
    """Writes `last.ckpt` every N optimiser steps, after the last step, and when an exception ends the fit.

    The last step's file is written before the loop closes its epoch, so that a longer run can continue from it with
    exactly the next sample (ModelCheckpoint's own `save_last` is written only when some other checkpoint is).
    `last_saved` is the path once it has been written. Before it is, what metrics.csv has of its steps is flushed: a run
    that goes on does not log them again.

    Every checkpoint that is written during a validation (best.ckpt, or last.ckpt after a signal) says that the training
    stood before that validation: Lightning would count a validation that was cut off as half made.

    After an exception the file is of the last step that was completed, and says that the training stood at its end. It
    is not written where the optimiser was at work, or several processes train: the others may wait for the one that
    failed. Nor after KeyboardInterrupt, which does not want to wait.
    """

    def __init__(self, folder: str | Path, every_n_steps: int | None = None) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"the steps between two checkpoints must be 1 or more (or none), got {every_n_steps}")
        self.path = Path(folder) / LAST
        self.every_n_steps = every_n_steps
        self.last_saved: str | None = None
        self._saved_step = -1
        self._steps = OptimizerStepCounter()
        self._ended: tuple[int, Any] = (-1, None)  # the last step that was completed, and the fit loop's state there
        self._updated = -1  # the step after which the optimiser began to change the weights

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.start(trainer)
        self._saved_step = trainer.global_step  # nothing new to save yet
        self._ended, self._updated = _end_of_step(trainer), -1
        _continue_metrics(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _continue_metrics(trainer)  # of a run that died in its last validation, and trains no more

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._updated = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.ended(trainer):
            return
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if due or trainer.global_step == trainer.max_steps:
            self.save(trainer)
        every = trainer.val_check_batch
        validates = trainer.is_last_batch or (isinstance(every, int) and (batch_idx + 1) % every == 0)
        if validates or trainer.world_size == 1:  # ranks may have to ask each other for the state of their data
            self._ended = _end_of_step(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        step, loop = self._ended
        cut_off = trainer.validating or trainer.interrupted
        if trainer.state.fn == "fit" and cut_off and step == trainer.global_step:
            checkpoint["loops"]["fit_loop"] = loop

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        step = trainer.global_step
        whole = isinstance(exception, Exception) and trainer.world_size == 1 and self._updated != step
        if not whole or trainer.state.fn != "fit" or self._saved_step in (-1, step):
            return
        pl_module.zero_grad(set_to_none=True)  # memory may have run out
        try:
            self.save(trainer)
            say(f"the checkpoint of step {step} is written, resume= goes on from it: {self.path}")
        except Exception as problem:  # noqa: BLE001 - what ended the fit is what is raised
            if str(problem) != str(exception):
                say(f"no checkpoint of step {step} is written: {_first_line(problem)}")

    def save(self, trainer: pl.Trainer) -> None:
        """Write last.ckpt now, unless this optimiser step already has; every rank must call it."""
        if trainer.fast_dev_run or self._saved_step == trainer.global_step:  # type: ignore[attr-defined]
            return
        _flush_metrics(trainer, in_step=self._ended[0] == trainer.global_step)
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_step = trainer.global_step
        self.last_saved = str(self.path)


def _end_of_step(trainer: pl.Trainer) -> tuple[int, dict[str, Any]]:
    return trainer.global_step, copy.deepcopy(trainer.fit_loop.state_dict())


def _continue_metrics(trainer: pl.Trainer) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, MetricsFile):
            logger.continue_from(trainer.global_step)


def _flush_metrics(trainer: pl.Trainer, *, in_step: bool) -> None:
    """Have what this step logged in metrics.csv. Lightning hands a step's metrics to the loggers after the hook in
    which its checkpoint is written; the same again is no other row. in_step: the next step has logged already."""
    connector = trainer._logger_connector
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        if not isinstance(logger, MetricsFile):
            continue
        if not in_step and trainer.training and connector.should_update_logs and trainer._results is not None:
            values = {name: float(value) for name, value in connector.metrics["log"].items()}
            if values:
                logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=step)
        logger.flush()


def _score(value: Any) -> torch.Tensor | None:
    """A validation's figure as a checkpoint has it; None for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        return value.detach().cpu().reshape(())
    return None


def _is_whole(path: Path) -> bool:
    """A complete torch archive (its directory, which a zip keeps at the end, is there), or folder of shards."""
    if not path.is_file():
        return checkpoint_exists(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _nearby(path: Path) -> str:
    near = sorted(str(p) for p in path.parent.glob("*.ckpt"))[:5] if path.parent.is_dir() else []
    return f"; in its folder are: {', '.join(near)}" if near else ""


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:160]
