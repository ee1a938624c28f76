"""Files of weights: safetensors read and written, described models, and flashtrain's own exports.

Weights on disk: a folder with config.json beside one or several safetensors files. Every failure is a UserError.

A model as a file describes it: believed only as far as the file's own tensors bear it out.

A checkpoint, an export and a config.json say how many layers of which width to build. All of that is checked by
arithmetic, before any memory is taken: each field's type, the number of layers against the number of tensors, and the
shape of every tensor against those of the same model without storage (torch's meta device).

flashtrain's own export: any of its models as model.safetensors and a config.json that says what model it is.

save_weights(model, "exported")
config, state_dict = load_weights("exported")
model = GPT2(config)
model.load_state_dict(state_dict)
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flashtrain import models
from flashtrain.errors import UserError, unknown
from flashtrain.files import foreign_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
SHARD_BYTES = 5 * 10**9  # of one weights file; transformers' and the hub's own size
CONFIG = "config.json"
GENERATION = "generation_config.json"
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
    for file in files_of_weights(path):
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


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes config.json and the weights (tensors from any device), each file whole or not at all; returns the folder.

    The weights are model.safetensors, or files of at most shard_bytes each (a larger tensor is one alone) with their
    index, as transformers has them. end_of_text: of a model that generates, for generation_config.json (None: no such
    file). UserError: the folder cannot be made or written, or the disk is full; earlier files there stay as they were.
    """
    folder = Path(folder).expanduser()
    shards = _shards(tensors, shard_bytes)
    names = [WEIGHTS] if len(shards) == 1 else [SHARD.format(n + 1, len(shards)) for n in range(len(shards))]
    texts = {CONFIG: config}
    if end_of_text is not None:
        texts[GENERATION] = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            stored = {key: _compact(tensors[key]) for key in shard}
            _replace(folder / name, partial(save_file, stored, metadata={"format": "pt"}))
        for name, content in texts.items():
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            _replace(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))
        for earlier in (folder / INDEX, folder / WEIGHTS, *folder.glob(SHARD.format(0, 0).replace("00000", "?????"))):
            if earlier.name not in names and earlier.name not in texts:
                earlier.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"weights cannot be written to {folder}: {_one_line(error)}.") from error
    return folder


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """The tensors' names, in their order, in files of at most so many bytes each; one list where there is nothing."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.nbytes
    return shards


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in memory of its own: safetensors takes no two parts of one."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


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


def files_of_weights(path: Path) -> list[Path]:
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


Config = TypeVar("Config")

LARGEST = 2**31 - 1  # of any size: tokens, rows, widths


def described_config(config_class: type[Config], given: Any, tensors: Mapping[str, Tensor], where: str) -> Config:
    """The configuration (a dataclass) that a file describes by plain values, for a model with these tensors.

    where: the file and the part of it that describes the model, for messages.
    UserError: a field that is unknown, missing, of another type, not finite or too large; more layers than tensors;
    sizes that cannot work together.
    """
    if not isinstance(given, dict):
        raise UserError(f"{where} does not describe a model: it is {shown(given)}.")
    known = {field.name: field for field in fields(config_class)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown(f"entry of {where}", str(name), known)
    types_of = get_type_hints(config_class)
    for name, field in known.items():
        if name in given:
            _check_value(given[name], types_of[name], f"{where}: {name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where} does not describe a model: it has no {name}.")
    layers = given.get("layers", 1)
    if layers > len(tensors):
        raise UserError(f"{where}: {layers:,} layers, and the file holds {len(tensors):,} tensors.")
    try:
        return config_class(**given)
    except UserError as error:
        raise UserError(f"{where} describes no model that can be: {error}") from error
    except (ArithmeticError, TypeError, ValueError) as error:  # a power of two huge numbers, say
        raise UserError(f"{where} describes no model that can be: {error}.") from error


def check_vocabulary(tokens: int, known: int, folder: Path) -> None:
    """UserError where a folder's tokenizer makes more tokens than its weights know: one of them would have no row."""
    if tokens > known:
        raise UserError(
            f"{folder}: its tokenizer makes {tokens:,} tokens, and its weights know {known:,}. Possible: the tokenizer "
            "that they were trained with."
        )


def check_weights(make: Callable[[], nn.Module], tensors: Mapping[str, Any], where: str) -> None:
    """UserError unless `tensors` are exactly the parameters of the model that `make` builds, in ordinary memory.

    make: builds it on the meta device, where nothing is stored. where: what the weights are in.
    """
    check_stored(tensors, where)
    check_tensors(tensors, shapes_of(make, where), where, "its description")


def shapes_of(make: Callable[[], nn.Module], where: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of the model that `make` builds. UserError: sizes that no tensor can have."""
    try:
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    except UserError as error:
        raise UserError(f"{where} describes no model that can be: {error}") from error
    except (RuntimeError, ArithmeticError, TypeError) as error:  # more bytes than can be counted
        raise UserError(f"{where} describes no model that can be: {' '.join(str(error).split())[:200]}.") from error


def check_stored(tensors: Mapping[str, Any], where: str) -> None:
    """UserError unless these are dense numbers that the file holds: a view of a single one can have any size."""
    stored: dict[int, int] = {}
    spread = 0
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
        if not plain or tensor.device.type != "cpu" or not tensor.is_floating_point():
            raise UserError(f"{where}: '{name}' is no weight: {shown(tensor)}.")
        storage = tensor.untyped_storage()
        stored[storage._cdata] = storage.nbytes()
        spread += tensor.nbytes
    if spread > 2 * sum(stored.values()):  # tied weights are stored once and named twice
        raise UserError(
            f"{where}: its tensors would take {spread:,} bytes, and the file holds {sum(stored.values()):,} of them."
        )


def trained_steps(saved: Mapping[str, Any], where: str | Path) -> int:
    """The optimiser steps that a checkpoint was trained for; 0 where it does not say. UserError: no count."""
    steps = saved.get("global_step", 0)
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise UserError(f"{where} is damaged: its global_step is {shown(steps)}. Possible: a count of steps.")
    return steps


def _check_value(value: Any, kind: Any, what: str) -> None:
    """UserError unless a value is of a dataclass field's type: bool, int, float, str, or one of these or None."""
    possible = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in possible:
        return
    if float in possible and type(value) in (int, float):
        if abs(value) <= LARGEST * LARGEST:  # neither NaN nor infinity is
            return
    elif type(value) in possible and (type(value) is not int or abs(value) <= LARGEST):
        return
    words = {int: f"a whole number up to {LARGEST:,}", float: "a finite number", str: "text", bool: "true or false"}
    raise UserError(f"{what} is {shown(value)}. Possible: {' or '.join(words.get(one, 'none') for one in possible)}.")


FORMAT = "flashtrain"
# Each kind of model by the name it has in config.json: (its configuration, the module), names of flashtrain.models.
MODELS = {"gpt2": ("GPT2Config", "GPT2"), "bert": ("BertConfig", "Bert")}


def save_weights(model: Any, folder: str | Path) -> Path:
    """Writes folder/model.safetensors (the state dict, in its own dtype) and folder/config.json; returns the folder.

    UserError: a model of an unknown kind, a folder that cannot be written.
    """
    for name, (_, module) in MODELS.items():
        if isinstance(model, getattr(models, module)):
            config = {"format": FORMAT, "model": name, "config": asdict(model.config)}
            return write_folder(folder, config, model.state_dict())
    raise unknown("kind of model to export", type(model).__name__, (module for _, module in MODELS.values()))


def exported_by_flashtrain(folder_or_file: str | Path) -> bool:
    """Whether the config.json there is one of save_weights'; False also where there is none."""
    path = Path(folder_or_file).expanduser()
    config = (path if path.is_dir() else path.parent) / CONFIG
    return config.is_file() and read_json(config).get("format") == FORMAT


def load_weights(folder_or_file: str | Path, kind: str = "gpt2") -> tuple[Any, dict[str, Tensor]]:
    """The configuration and state dict that save_weights wrote, tensors on the CPU.

    kind: of the model that is expected, a name of MODELS.
    UserError: nothing there, weights of another program or kind, a configuration or tensor that does not fit.
    """
    content, tensors = read_folder(folder_or_file)
    if content.get("format") != FORMAT:
        raise UserError(
            f"{folder_or_file} was not exported by flashtrain ({CONFIG} has no format={FORMAT}). "
            "Possible: a folder that mode=export wrote; Hugging Face weights are read by load_gpt2 and load_bert."
        )
    name = str(content.get("model"))
    if name not in MODELS:
        raise unknown("kind of model", name, MODELS)
    if name != kind:
        raise UserError(f"{folder_or_file} holds a {name}. Possible: a {kind}.")
    config_class, module = (getattr(models, each) for each in MODELS[name])
    where = f"{folder_or_file}/{CONFIG}" if Path(folder_or_file).is_dir() else f"the {CONFIG} beside {folder_or_file}"
    config = described_config(config_class, content.get("config"), tensors, where)
    check_stored(tensors, str(folder_or_file))
    check_tensors(tensors, shapes_of(lambda: module(config, attention="sdpa"), where), folder_or_file)
    return config, tensors
