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

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


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
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read as safetensors: {_one_line(error)}.") from error
    return config, tensors


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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {_one_line(error)}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}. Possible: a JSON object.")
    return content


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
            f"{where} holds another architecture ({CONFIG} says {given}). Possible: model_type {model_type}."
        )
    for name, possible in computation.items():
        if content.get(name, possible[0]) not in possible:
            raise UserError(
                f"{where}: {name}={content[name]} in {CONFIG}. Possible: {' or '.join(map(str, possible))}."
            )
    for name in sizes:
        if not isinstance(content.get(name), int):
            raise UserError(f"{where}: {name} in {CONFIG} is {content.get(name)}. Possible: a whole number.")
    return {name: content[name] for name in sizes}


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str | Path) -> None:
    """UserError naming the first tensor that is missing, too many, or of another shape than its configuration says."""
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{where} has no tensor '{name}', which its {CONFIG} calls for.")
        if tuple(found[name].shape) != shape:
            raise UserError(
                f"{where}: '{name}' has shape {tuple(found[name].shape)} where its {CONFIG} calls for {shape}."
            )
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        raise UserError(
            f"{where} holds {len(surplus)} tensors that its {CONFIG} does not call for: '{surplus[0]}', ..."
        )


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
        # Names only: an index must not lead to files outside its folder.
        shards = sorted({Path(str(name)).name for name in weight_map.values()})
        for shard in shards:
            if not (path / shard).is_file():
                raise UserError(f"no {shard} in {path}, which {INDEX} names.")
        return [path / shard for shard in shards]
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    raise UserError(
        f"no {WEIGHTS} in {path}. Possible: a folder with {CONFIG} and {WEIGHTS} (or its shards and {INDEX})."
    )


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
