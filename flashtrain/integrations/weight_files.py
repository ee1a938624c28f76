"""Reading and writing weights in transformers' folder format: config.json and one or
several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.files.json_files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
SHARD_BYTES = 5 * 10**9  # of one weights file; transformers' and the hub's own size
CONFIG = "config.json"
GENERATION = "generation_config.json"

Part = tuple[str, int]  # a tensor's name and its rows


def read_folder(folder_or_file: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read config.json and every tensor, onto the CPU.

    Args:
        folder_or_file: A folder with one weights file, or with shards and their
            index; or a weights file.

    Raises:
        UserError: There are no weights, or a file is truncated.
        OSError: There is no config.json next to the weights.
    """
    path = Path(folder_or_file).expanduser()
    if not path.exists():
        raise UserError(f"no weights at {path}: expected a folder with {CONFIG} and {WEIGHTS}.")
    config = read_json((path if path.is_dir() else path.parent) / CONFIG)
    tensors: dict[str, Tensor] = {}
    for file in files_of_weights(path):
        tensors.update(read_tensors(file))
    return config, tensors


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file onto the CPU; UserError for a truncated
    file or another format."""
    # huggingface_hub 2.4's load_state_dict_from_file advises to read a truncated file as a pickle.
    try:
        return load_file(file)
    except SafetensorError as error:
        raise cut_off(file, error) from error


def cut_off(file: Path, error: SafetensorError) -> UserError:
    """Return (not raise) the UserError for a truncated file; unlike safetensors' own
    error it names the file."""
    return UserError(
        f"{file} is not a complete safetensors file ({error}). Copy or download it again."
    )


# huggingface_hub assigns tensors to shards. Its save_torch_state_dict (2.4) removes the earlier
# files first, so that a kill leaves none (40 of 40), and refuses views of a larger tensor. Hence a
# folder of unfinished files, and copies of one shard at a time.
def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    end_of_text: int | None = None,
) -> None:
    """Write config.json and the weights, all or nothing.

    The weights are model.safetensors, or files of at most SHARD_BYTES each (a larger tensor gets
    its own) with an index, as in transformers.

    Args:
        folder: The folder to write to, created where it is missing.
        config: The content of config.json.
        tensors: The tensors by name, on any device.
        end_of_text: The id of the token that ends a text, for
            generation_config.json (None: no such file).

    Raises:
        OSError: The folder cannot be written, or the disk is full; earlier files
            then stay as they were.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta")
        for name, one in tensors.items()
    }
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    texts = {CONFIG: config}
    if end_of_text is not None:
        # transformers' generate takes use_cache from this file alone.
        caches = {name: config[name] for name in ("use_cache",) if name in config}
        texts[GENERATION] = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, **caches}
    if split.is_sharded:
        texts[INDEX] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    with TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
        for file, names in split.filename_to_tensors.items():
            shard = {name: _compact(tensors[name]) for name in names}
            save_file(shard, Path(unfinished, file), metadata={"format": "pt"})
        for file, content in texts.items():
            Path(unfinished, file).write_text(
                json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        # A folder without config.json is not a model, so that a kill from here on leaves no
        # mixture of two models.
        for earlier in (folder / CONFIG, folder / INDEX, folder / WEIGHTS, *folder.glob(SHARDS)):
            earlier.unlink(missing_ok=True)
        for name in (*split.filename_to_tensors, *reversed(texts)):
            Path(unfinished, name).replace(folder / name)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in its own memory: safetensors rejects tensors that share memory."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def files_of_weights(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, or the file itself; UserError for none,
    or for another format."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(
                f"{path.name} is not a safetensors file: "
                "expected such a file, or a folder with one."
            )
        return [path]
    # transformers' order: of a save over shards, which stay, one file is the newer.
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise UserError(f"no {WEIGHTS} in {path}: expected this file, or its shards and {INDEX}.")
    # Only files in this folder, whatever the index names.
    files = sorted(
        {path / Path(name).name for name in read_json(path / INDEX)["weight_map"].values()}
    )
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"no {missing[0]} in {path}, which {INDEX} names. Copy or download it again."
        )
    return files


def check_architecture(
    content: Mapping[str, Any],
    kinds: Iterable[str],
    computation: Mapping[str, Sequence[Any]],
    where: str | Path,
) -> None:
    """Raise UserError for a transformers config.json of another architecture
    or another computation.

    Args:
        content: The content of config.json.
        kinds: The supported values of model_type.
        computation: Accepted values of further entries; the first also applies
            where an entry is missing.
        where: The file or folder, for messages.
    """
    given = content.get("model_type", "no model_type")
    if given not in kinds:
        raise UserError(
            f"{where} contains a model of model_type {given}: expected {', '.join(kinds)}."
        )
    for name, possible in computation.items():
        if content.get(name, possible[0]) not in possible:
            raise UserError(
                f"{where}: {name}={content[name]} in {CONFIG} is not what our model computes: "
                f"expected {' or '.join(map(str, possible))}."
            )


def converted(
    tensors: Mapping[str, Tensor],
    make: Callable[[], nn.Module],
    parts_of: Callable[[str, int], Sequence[Part]],
    where: str | Path,
) -> dict[str, Tensor]:
    """Make the state dict of our model from transformers' tensors.

    Args:
        tensors: The tensors under transformers' names.
        make: Builds our model; it is called on the meta device, for the names and shapes.
        parts_of: Maps (name, rows) of one of our tensors to the (name, rows) of
            transformers' tensors that are concatenated to it. Missing last rows, of an
            embedding table, become zero.
        where: The file or folder, for messages.

    Raises:
        UserError: A tensor is missing, unknown, or of another shape.
    """
    with torch.device("meta"):  # takes no memory
        ours = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    parts = {name: parts_of(name, shape[0]) for name, shape in ours.items()}
    expected = {part: (rows, *ours[name][1:]) for name in ours for part, rows in parts[name]}
    for name in (*expected, *tensors):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != expected.get(name):
            raise UserError(
                f"{where}: '{name}' has the shape {found} in the weights, and {CONFIG} expects "
                f"{expected.get(name)} (None: no such tensor)."
            )
    state = {}
    for name, shape in ours.items():
        rows = [tensors[part] for part, _ in parts[name]]
        added = shape[0] - sum(len(one) for one in rows)
        rows += [rows[0].new_zeros(added, *shape[1:])] if added else []
        state[name] = torch.cat(rows) if len(rows) > 1 else rows[0]
    return state
