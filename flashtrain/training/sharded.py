"""Write and read sharded checkpoints: folders into which every rank writes its part of the
tensors during training.

last.ckpt/
  current.json  names the folder that is the checkpoint
  120-0/        the checkpoint of step 120: plain.ckpt, and every rank's shards as safetensors files
"""

from __future__ import annotations

import io
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import SequenceKey, tree_map_with_path

from flashtrain.errors import UserError
from flashtrain.files.disk import flush, os_errors, replacing
from flashtrain.files.json_files import read_json

# torch.distributed.checkpoint plans, writes and reads the shards, for any number of ranks. Two gaps
# of torch 2.13 are closed here. Its own format has a pickled .metadata, which can run code: here
# shards are safetensors. A kill while a folder is overwritten damages either format: here each
# checkpoint is a new folder, which current.json names once it is complete.
CURRENT = "current.json"
PLAIN = "plain.ckpt"
TEMPORARY = ".parts"  # ends the name of a sharded checkpoint that is to replace a checkpoint file
TIED = "tied_weights"  # key of plain.ckpt: names of tied weights -> the weight that each is tied to
PARTS = ("state_dict", "optimizer_states")  # keys of a checkpoint whose tensors are sharded
# Of one file's tensors over all ranks; what is written together is copied in host memory.
FILE_BYTES = 2**31
_GENERATION = re.compile(r"\d{1,15}-\d{1,9}")


def is_sharded(path: str | Path) -> bool:
    """Return whether `path` is a complete sharded checkpoint."""
    return (Path(path) / CURRENT).is_file() and (current(path) / PLAIN).is_file()


def current(path: str | Path) -> Path:
    """Return the folder, below `path`, of the complete checkpoint. Raises
    UserError if there is none."""
    file = Path(path) / CURRENT
    if not file.is_file():
        raise UserError(f"{path} is a folder, not a checkpoint file. Give one of its .ckpt files.")
    return Path(path) / Path(read_json(file)["folder"]).name


def next_generation(path: Path, step: int) -> str:
    """Return an unused folder name, such as "120-0", for the next checkpoint of this step."""
    taken = {
        entry.name
        for place in (path, _temporary(path))
        if place.is_dir()
        for entry in place.iterdir()
    }
    return next(
        name for name in (f"{step}-{number}" for number in range(10**9)) if name not in taken
    )


def split(
    checkpoint: Mapping[str, Any], tied: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Separate a checkpoint into its tensors of weights and optimizer states, which are saved as
    shards, and its other values.

    Args:
        checkpoint: as Lightning makes it.
        tied: name of a tied weight -> name of the weight that it is tied to;
            only the latter is saved.

    Returns:
        (the checkpoint with these tensors on the meta device, where they have a shape and no data;
        the tensors by name).
    """
    tensors: dict[str, torch.Tensor] = {}

    def taken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors[name] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    parts = {part: checkpoint[part] for part in PARTS if part in checkpoint}
    state = parts.get("state_dict", {})
    tied = {name: other for name, other in (tied or {}).items() if name in state and other in state}
    if tied:
        parts["state_dict"] = {name: one for name, one in state.items() if name not in tied}
    plain = {**checkpoint, **_mapped(parts, taken)}
    return ({**plain, TIED: tied} if tied else plain), tensors


def joined(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the checkpoint that `split` took apart, with the given tensors in their places.

    Args:
        plain: the first result of `split`.
        tensors: tensors by name; those that are missing stay on the meta device.
    """
    parts = {part: plain[part] for part in PARTS if part in plain}
    checkpoint = {**plain, **_mapped(parts, lambda name, tensor: tensors.get(name, tensor))}
    for name, other in plain.get(TIED, {}).items():
        checkpoint["state_dict"][name] = checkpoint["state_dict"][other]
    return checkpoint


def load(folder: Path, plain: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors from the shards, in place.

    Args:
        folder: the checkpoint's folder.
        plain: the contents of its plain.ckpt.
        tensors: the tensors to fill, by name; for a DTensor only this rank's part is read.

    Raises:
        UserError: a tensor is missing in the checkpoint, has another shape, or some of
            its parts are missing.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    _, known = split(plain)
    for name, tensor in tensors.items():
        if name not in known or known[name].shape != tensor.shape:
            there = f"has shape {tuple(known[name].shape)}" if name in known else "is missing"
            raise UserError(
                f"{folder} is not of this model: "
                f"{name} {there}, expected shape {tuple(tensor.shape)}."
            )
    _check_parts(folder, tensors)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Each rank reads its own part: no communication.
            dcp.load(
                dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True
            )
    except CheckpointException as error:  # a BaseException
        raise RuntimeError(" ".join(str(one) for one, _ in error.failures.values())) from error


def whole(folder: Path, plain: Mapping[str, Any], parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Return a checkpoint with unsharded tensors in host memory.

    Args:
        folder: the checkpoint's folder.
        plain: the contents of its plain.ckpt.
        parts: keys of the checkpoint whose tensors are read; the others stay on the meta device.

    Raises:
        UserError: parts of a tensor are missing.
    """
    _, known = split({part: plain[part] for part in parts if part in plain})
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in known.items()
    }
    load(folder, plain, tensors)
    return joined(plain, tensors)


def numbered(optimizer_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with parameters by number, as torch's optimizers load it, from a
    state with parameters by name."""
    groups = optimizer_state["param_groups"]
    names = [name for group in groups for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: state for name, state in optimizer_state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]} for group in groups
        ],
    }


class ShardWriter:
    """Writes sharded checkpoints in a thread, one at a time. Every rank must make the same calls.

    `start` copies the tensors to host memory (pinned for a GPU's, and reused by the next
    checkpoint) before it returns, so that training can continue. A checkpoint becomes the current
    one when every rank has written its part. Errors are raised by `finish`, on every rank.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[None] | None = None
        self._stager: Any = None
        self._group: Any = None

    def start(
        self,
        plain: Mapping[str, Any],
        tensors: dict[str, torch.Tensor],
        path: Path,
        generation: str,
    ) -> None:
        """Start writing a checkpoint, after the one before is finished.

        Args:
            plain, tensors: the results of `split`.
            path: the checkpoint, such as checkpoints/last.ckpt.
            generation: the name of the folder in it, from `next_generation`.
        """
        from torch.distributed.checkpoint._state_dict_stager import StateDictStager

        self.finish()
        # torch 2.13 cannot stage a part that begins inside a storage, as of a file on a CPU.
        tensors = {
            name: one.clone() if hasattr(one, "_local_tensor") and one.storage_offset() else one
            for name, one in tensors.items()
        }
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._stager is None:
            # Used by the public DefaultStager, which torch 2.11 closes too early: its second
            # call raises KeyError.
            self._stager = StateDictStager(pin_memory=on_gpu)
            # Separates the thread's messages from the training's.
            if torch.distributed.is_initialized():
                self._group = torch.distributed.new_group(backend="gloo")
        staged = self._stager.stage(tensors, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        values = io.BytesIO()
        torch.save(dict(plain), values)
        self._running = self._thread.submit(
            self._write, values.getvalue(), staged, path, generation
        )

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises UserError if that failed; the earlier
        checkpoint is then intact."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(
        self, values: bytes, tensors: dict[str, torch.Tensor], path: Path, generation: str
    ) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        several = self._group is not None
        first = not several or dist.get_rank() == 0
        home = _temporary(path) if path.is_file() else path
        folder = home / generation
        writer = HuggingFaceStorageWriter(str(folder), _files(tensors), save_distributed=True)
        problem: str | None = None
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=not several)
            if first:
                _check_parts(folder, tensors)
                (folder / PLAIN).write_bytes(values)
                flush(folder / PLAIN)
                _take_place(home, path, generation)
        except (CheckpointException, OSError, UserError) as error:
            # CheckpointException: of any rank.
            problem = str(not_written(error, path))
        if several:
            found = [problem]
            dist.broadcast_object_list(found, group=self._group, group_src=0)
            problem = problem or found[0]
        if problem is not None:
            if first and not (is_sharded(home) and current(home) == folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise UserError(problem)


def _take_place(home: Path, path: Path, generation: str) -> None:
    """Make the complete folder `generation` the current checkpoint of `path`, then delete the
    earlier folders."""
    flush(home / generation)
    with replacing(home / CURRENT, sync=True) as unfinished:
        unfinished.write_text(json.dumps({"folder": generation}))
    if home != path:  # replaces a checkpoint that was a single file
        path.unlink()
        home.rename(path)
    for entry in path.iterdir():
        if entry.name != generation and _GENERATION.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)


def _files(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return for each tensor the number, from 1, of the file into which each rank writes its part
    of the tensor."""
    number, filled, files = 1, 0, {}
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += tensor.nbytes
    return files


def _mapped(value: Any, function: Callable[[str, torch.Tensor], Any]) -> Any:
    """Return a copy of nested dictionaries and lists with every tensor replaced by function(name,
    tensor); the name is the path to the tensor, such as "state_dict/weight"."""

    def at(path: tuple[Any, ...], one: Any) -> Any:
        keys = (key.idx if isinstance(key, SequenceKey) else key.key for key in path)
        name = "/".join(map(str, keys))
        return function(name, one) if isinstance(one, torch.Tensor) else one

    return tree_map_with_path(at, value)


def _check_parts(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError if the folder lacks a part of a tensor, which torch's reader does not
    notice."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found: Mapping[str, Any] = (
        HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    )
    for name, tensor in tensors.items():
        if (
            name not in found
            or sum(chunk.sizes.numel() for chunk in found[name].chunks) != tensor.numel()
        ):
            raise UserError(
                f"{folder} lacks parts of {name}. Copy all files of the checkpoint there; "
                "several machines need a shared disk."
            )


def not_written(error: BaseException, path: Path) -> UserError:
    """Make the UserError for a checkpoint that could not be written, for example because
    a rank's disk is full."""
    failures = [one for one, _ in getattr(error, "failures", {}).values()] or [error]
    cause = next((found for one in failures for found in os_errors(one)), failures[0])
    earlier = f"the earlier {path.name} is intact" if path.exists() else "no earlier one existed"
    return UserError(
        f"could not write checkpoint {path}: {getattr(cause, 'strerror', None) or cause}; {earlier}"
    )
