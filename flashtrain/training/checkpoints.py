"""Checkpoints that survive: written whole or not at all, read without running code, found again for resuming.

A run folder's `checkpoints/` holds `last.ckpt` (every N optimiser steps and at the end; what resuming continues from)
and `best.ckpt` (lowest validation loss; without the optimiser's states). Both are single files, or folders of what
every rank wrote (sharded.py). checkpoint_callbacks.py says when they are written.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from flashtrain.errors import UserError
from flashtrain.files.disk import os_errors
from flashtrain.training import sharded

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

    # Lightning 2.6.6 writes into TMPDIR and moves it: a copy where that is another file system (its issue 21253), and
    # 11 of 100 kills left a damaged last.ckpt; of ours none of 60. And all of it lies in memory first, a second time.
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        save_atomically(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = read_checkpoint(path, map_location=map_location, optimizers=True)
        rebuild_paths(checkpoint, Path(path).parent)
        return checkpoint


def save_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """torch.save to a name beside `path`, flushed to the disk, then moved to `path` in one step.

    Raises UserError where the disk is full or the folder cannot be written; `path` is then as it was.
    """
    # Of one name, unlike disk.replacing's: what a kill leaves, gigabytes, the next write replaces.
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
    if path.is_dir():  # that of a run whose ranks wrote a folder
        shutil.rmtree(earlier, ignore_errors=True)
        path.rename(earlier)
    partial.replace(path)
    shutil.rmtree(earlier, ignore_errors=True)


def rebuild_paths(checkpoint: dict[str, Any], folder: Path) -> None:
    """Let no path in a loaded checkpoint's callbacks be believed: Lightning's ModelCheckpoint deletes the file that a
    better one replaces, wherever its state says that it lies. Of each path the name is kept, as a checkpoint in
    `folder`, the checkpoint's own."""
    folder = folder.resolve()  # as ModelCheckpoint has it

    def here(path: str) -> str:
        name = Path(path).name
        return str(folder / name) if name.endswith(".ckpt") else ""

    for state in checkpoint.get("callbacks", {}).values():
        state.update({key: here(state[key]) for key in _PATH_KEYS if key in state})
        if "dirpath" in state:
            state["dirpath"] = str(folder)
        if "best_k_models" in state:
            state["best_k_models"] = {here(path): score for path, score in state["best_k_models"].items()}


def checkpoint_exists(path: Path) -> bool:
    """Whether there is a checkpoint of this name that may be read, a file or a folder that is whole."""
    return path.is_file() or sharded.is_sharded(path)


def read_checkpoint(
    path: str | Path, map_location: Any = "cpu", *, mmap: bool = False, optimizers: bool = False
) -> dict[str, Any]:
    """The dictionary in a checkpoint, by torch.load with weights_only=True. mmap: read tensors when they are used.

    Of a folder of shards the weights are put together in host memory, with `optimizers` the optimisers' states too;
    what is not (with mmap neither) has its shape alone, on the meta device.
    Raises UserError where it is missing, and torch's own errors for a file that is damaged, or could run code.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path, map_location, mmap)
    folder = sharded.current(path)
    plain = _read_file(folder / sharded.PLAIN, "cpu", False)
    if mmap:
        return plain
    checkpoint = sharded.whole(folder, plain, sharded.PARTS if optimizers else sharded.PARTS[:1])
    if optimizers and checkpoint.get("optimizer_states"):
        checkpoint["optimizer_states"] = [sharded.numbered(one) for one in checkpoint["optimizer_states"]]
    return checkpoint


def _read_file(path: Path, map_location: Any, mmap: bool) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(str(one) for one in path.parent.glob("*.ckpt"))[:5]
        raise UserError(f"there is no checkpoint {path}" + (f"; in its folder are: {', '.join(near)}" if near else ""))
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        if torch.serialization.get_unsafe_globals_in_checkpoint(path) != [STATES_OF_8_BITS]:
            raise
        import torchao.optim  # noqa: F401 - from then on torch reads tensors of this one class of its

        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)


def read_weights(path: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint, on the CPU, for evaluating, generating or exporting.

    prefix: the attribute under which the LightningModule keeps the wanted module ("model."); only its weights are
    returned, without it. Names that torch.compile changed are given back their own. Raises UserError as
    `read_checkpoint`, and where the file holds no weights under the prefix.
    """
    return weights_in(read_checkpoint(path), path, prefix)


def weights_in(checkpoint: dict[str, Any], path: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """As `read_weights`, for a checkpoint that has been read from `path` already."""
    plain = {name.replace("_orig_mod.", ""): value for name, value in checkpoint.get("state_dict", {}).items()}
    weights = {name[len(prefix) :]: value for name, value in plain.items() if name.startswith(prefix)}
    if not weights:
        raise UserError(
            f"{path} holds no weights whose names begin with '{prefix}'; it has {', '.join(list(plain)[:3])} ..."
        )
    return weights


def find_resumable(folder: str | Path) -> Path | None:
    """The newest `last.ckpt` in a folder or anywhere below it; None where there is none."""
    found = [path for path in Path(folder).rglob(LAST) if checkpoint_exists(path)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
