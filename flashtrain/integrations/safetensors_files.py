"""Weights on disk: a folder with config.json beside one or several safetensors files. Every failure is a UserError."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.files import foreign_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SHOWN = 80  # characters of a value from a file that a message shows


def read_folder(folder_or_file: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and every tensor, on the CPU, of a folder (one weights file, or shards and their index) or one file.

    UserError: nothing there, no config.json beside the weights, a shard missing, a file that cannot be read.
    """
    path = Path(folder_or_file).expanduser()
    if not path.exists():
        raise UserError(
            f"no weights at {path}: no such folder or file. Possible: a folder with {CONFIG} and {WEIGHTS}."
        )
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / CONFIG)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        tensors.update(read_tensors(file))
    return config, tensors


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU; the library checks its header against the file's size.

    UserError: a file that cannot be read.
    """
    if not file.is_file():
        raise UserError(f"there is no weights file {file}.")
    try:
        return load_file(file)
    # Beside its own errors the library lets through torch's, of a type or a shape that torch has not.
    except (OSError, SafetensorError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {_one_line(error)}.") from error


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Writes config.json and model.safetensors (tensors from any device), each whole or not at all; returns the folder.

    UserError: the folder cannot be made or written, or the disk is full; earlier files there then stay as they were.
    """
    folder = Path(folder).expanduser()
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / WEIGHTS, lambda path: save_file(contiguous, path, metadata={"format": "pt"}))
        _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"weights cannot be written to {folder}: {_one_line(error)}.") from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. UserError: no such file, or not a JSON object."""
    if not path.is_file():
        raise UserError(f"no {path.name} in {path.parent}. Possible: a folder with {CONFIG} and {WEIGHTS}.")
    return foreign_files.read_json_object(path)


def read_architecture(
    content: Mapping[str, Any],
    model_type: str,
    computation: Mapping[str, Sequence[Any]],
    sizes: Sequence[str],
    where: str | Path,
) -> dict[str, int]:
    """The sizes that a transformers config.json names, each a whole number.

    model_type: the one that is read. computation: what the file may say of each entry, absent meaning the first.
    UserError: another architecture, another computation, a size that is missing or no whole number.
    """
    if content.get("format") == "flashtrain":
        raise UserError(f"{where} was exported by flashtrain, not by transformers. Possible: load_weights reads it.")
    given = content.get("model_type", "no model_type")
    if given != model_type:
        raise UserError(
            f"{where} holds another architecture ({CONFIG} says {shown(given)}). Possible: model_type {model_type}."
        )
    for name, possible in computation.items():
        if content.get(name, possible[0]) not in possible:
            raise UserError(
                f"{where}: {name}={shown(content[name])} in {CONFIG}. Possible: {' or '.join(map(str, possible))}."
            )
    for name in sizes:
        if type(content.get(name)) is not int or not 1 <= content[name] < 2**31:
            raise UserError(f"{where}: {name} in {CONFIG} is {shown(content.get(name))}. Possible: a whole number.")
    return {name: content[name] for name in sizes}


def check_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str | Path, says: str = f"its {CONFIG}"
) -> None:
    """UserError naming the first tensor that is missing, too many, or of another shape than its configuration says.

    says: what of `where` the configuration stands in.
    """
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{where} has no tensor '{name}', which {says} calls for.")
        if tuple(found[name].shape) != shape:
            raise UserError(f"{where}: '{name}' has shape {tuple(found[name].shape)} where {says} calls for {shape}.")
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        raise UserError(f"{where} holds {len(surplus)} tensors that {says} does not call for: '{surplus[0]}', ...")


def shown(value: Any) -> str:
    """A value from a file, in a message: short, whatever it is."""
    if type(value) is int and value.bit_length() > 200:  # Python refuses to write out one of thousands of digits
        return f"a number of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)[:SHOWN]
    return f"a {type(value).__name__}"


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(
                f"{path.name} is not a safetensors file. Possible: a .safetensors file, or a folder with one."
            )
        return [path]
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{path / INDEX} has no weight_map. Possible: an index as transformers writes it.")
        shards = sorted({_shard_name(name, path / INDEX) for name in weight_map.values()})
        for shard in shards:
            if not (path / shard).is_file():
                raise UserError(f"no {shard} in {path}, which {INDEX} names.")
        return [path / shard for shard in shards]
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    raise UserError(
        f"no {WEIGHTS} in {path}. Possible: a folder with {CONFIG} and {WEIGHTS} (or its shards and {INDEX})."
    )


def _shard_name(name: Any, index: Path) -> str:
    """UserError unless it is a mere name of a safetensors file: an index must not lead out of its folder."""
    plain = isinstance(name, str) and name == Path(name).name and not set(name) & {"\\", "\0"}
    if not plain or not name.endswith(".safetensors"):
        raise UserError(f"{index} names the shard {str(name)[:80]!r}. Possible: a .safetensors file of its own folder.")
    return str(name)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside `path` and renames: a run killed midway never leaves half a file under the real name."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
