"""Checkpoint files: written whole or not at all, and read without running code."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import os_errors
from flashtrain.training import sharded

# In a run folder's `checkpoints/`. Each is a single file, or a folder of every rank's
# shards (sharded.py).
LAST = "last.ckpt"  # from which a run resumes
BEST = "best.ckpt"  # of the best validation, without the optimizer's states
# Of ModelCheckpoint's state.
_PATH_KEYS = ("best_model_path", "kth_best_model_path", "last_model_path")
STATES_OF_8_BITS = "torchao.optim.subclass_8bit.OptimState8bit"
MODEL = "model."  # begins the names of the weights of a LightningModule's model
PARTIAL = ".partial"  # ends the name of a file that is still being written


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoint files under a temporary name, and moves them
    into place when complete.

    A kill during a write, or a full disk (a UserError), leaves the previous file as it was. A kill
    also leaves a `*.partial` file, which the next write replaces. Reading always uses
    weights_only=True, so that a checkpoint cannot run code. Usage:
    `Trainer(plugins=[AtomicCheckpointIO()])`.
    """

    # Lightning 2.6.6 writes into TMPDIR and moves the file, which copies it if that is another file
    # system (its issue 21253): 11 of 100 kills left a damaged last.ckpt, with this code none of 60.
    # It also buffers the file in memory.
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        save_atomically(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = read_checkpoint(path, map_location=map_location, optimizers=True)
        rebuild_paths(checkpoint, Path(path).parent)
        return checkpoint


def save_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """Save a checkpoint under a temporary name in the same folder, flush it to the disk,
    then rename it to `path`.

    Raises UserError if the disk is full or the folder cannot be written; `path` is then unchanged.
    """
    # One fixed name, unlike disk.replacing: the next write replaces the
    # gigabytes that a kill leaves.
    partial, earlier = path.with_name(path.name + PARTIAL), path.with_name(f"{path.name}.earlier")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as problem:
        with contextlib.suppress(OSError):
            partial.unlink()
        if next(os_errors(problem), None) is None:
            raise
        raise sharded.not_written(problem, path) from problem
    if path.is_dir():  # an earlier sharded checkpoint
        shutil.rmtree(earlier, ignore_errors=True)
        path.rename(earlier)
    partial.replace(path)
    shutil.rmtree(earlier, ignore_errors=True)


def link(path: str | Path, other: str | Path) -> None:
    """Give a checkpoint's files second names; copy them where the disk has no such links."""
    if Path(path).is_dir():
        shutil.copytree(path, other, copy_function=link)
        return
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def rebuild_paths(checkpoint: dict[str, Any], folder: Path) -> None:
    """Change all paths in the callback states of a loaded checkpoint to files of the
    same names in `folder`.

    Otherwise ModelCheckpoint, when it replaces its best file, would delete whatever path
    the loaded file names.
    """
    folder = folder.resolve()  # as ModelCheckpoint has it

    def here(path: str) -> str:
        name = Path(path).name
        return str(folder / name) if name.endswith(".ckpt") else ""

    for state in checkpoint.get("callbacks", {}).values():
        state.update({key: here(state[key]) for key in _PATH_KEYS if key in state})
        if "dirpath" in state:
            state["dirpath"] = str(folder)
        if "best_k_models" in state:
            state["best_k_models"] = {
                here(path): score for path, score in state["best_k_models"].items()
            }


def checkpoint_exists(path: Path) -> bool:
    """Return whether `path` is a checkpoint that can be read: a file, or a
    complete folder of shards."""
    return path.is_file() or sharded.is_sharded(path)


def read_checkpoint(
    path: str | Path,
    map_location: Any = "cpu",
    *,
    mmap: bool = False,
    optimizers: bool = False,
    checked: bool = False,
) -> dict[str, Any]:
    """Read the dictionary in a checkpoint, by torch.load with weights_only=True.

    Args:
        path: a file, or a folder of shards, whose weights are joined in host memory.
        map_location: torch.load's, for a file.
        mmap: read a file's tensors only when they are used; leave a folder's tensors unread, on the
            meta device.
        optimizers: read the optimizers' states in a folder too, instead of leaving them unread, on
            the meta device.
        checked: compare a file's content with its checksums also if `mmap` is true (without `mmap`
            it always is). Shards have no checksums.

    Raises:
        UserError: the folder has no complete checkpoint, or a file is damaged.
        pickle.UnpicklingError: a file could run code, or is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path, map_location, mmap, checked or not mmap)
    folder = sharded.current(path)
    plain = _read_file(folder / sharded.PLAIN, "cpu", False)
    if mmap:
        return plain
    checkpoint = sharded.whole(folder, plain, sharded.PARTS if optimizers else sharded.PARTS[:1])
    if optimizers and checkpoint.get("optimizer_states"):
        checkpoint["optimizer_states"] = [
            sharded.numbered(one) for one in checkpoint["optimizer_states"]
        ]
    return checkpoint


def _read_file(path: Path, map_location: Any, mmap: bool, checked: bool = True) -> dict[str, Any]:
    try:
        if zipfile.is_zipfile(path):  # torch has the error of another file
            with zipfile.ZipFile(path) as file:
                # torch.save writes a CRC-32 of every part of the file, which torch
                # 2.13 does not compare.
                if checked and (part := file.testzip()) is not None:
                    raise UserError(
                        f"{path} is damaged: the checksum of {part} in it is wrong. "
                        "Use another checkpoint."
                    )
            if torch.serialization.get_unsafe_globals_in_checkpoint(path) == [STATES_OF_8_BITS]:
                import torchao.optim  # noqa: F401 - its import allows torch to load this one class
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (OSError, UserError):
        raise
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f"{path}: {error}") from error
    except Exception as error:
        raise UserError(f"{path} is damaged, or no checkpoint: {first_line(error)}.") from error


def weights_in(checkpoint: dict[str, Any], path: str | Path) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint, by the names that the LightningModule's `model` itself
    has for them.

    Args:
        checkpoint: the result of `read_checkpoint`.
        path: the checkpoint's path, for messages of errors.

    Raises:
        UserError: the checkpoint has no such weights.
    """
    plain = {
        name.replace("_orig_mod.", ""): value
        for name, value in checkpoint.get("state_dict", {}).items()
    }
    weights = {
        name.removeprefix(MODEL): value for name, value in plain.items() if name.startswith(MODEL)
    }
    if not weights:
        raise UserError(
            f"{path} has no weights whose names begin with '{MODEL}', "
            f"only {', '.join([*plain][:3])} ... "
            "Expected the checkpoint of a LightningModule with the attribute `model`."
        )
    return weights


def check_resumable(saved: Mapping[str, Any], checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint. Raises UserError if it holds weights
    only, as best.ckpt does."""
    if not saved.get("optimizer_states"):
        raise UserError(
            f"{checkpoint} has no state of the optimizer, so a run cannot be resumed from it. "
            f"To train its weights further, use weights={checkpoint} without resume=."
        )
    return saved["global_step"]
