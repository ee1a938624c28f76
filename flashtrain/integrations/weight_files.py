"""A folder of weights as transformers has it: config.json beside one or several safetensors files, read and written."""

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


def read_folder(folder_or_file: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and every tensor, on the CPU, of a folder (one weights file, or shards and their index) or one file.

    UserError: nothing there, a file that is cut off. OSError: no config.json beside the weights.
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
    """Every tensor of a safetensors file, on the CPU. UserError: a file that is cut off, or is something else."""
    # huggingface_hub 2.4's load_state_dict_from_file advises to read a file that is cut off as a pickle.
    try:
        return load_file(file)
    except SafetensorError as error:
        raise cut_off(file, error) from error


def cut_off(file: Path, error: SafetensorError) -> UserError:
    """What safetensors says of a file, with the file's name, which it leaves out. Returned, not raised."""
    return UserError(f"{file} is no whole safetensors file ({error}): copy or download it again.")


# huggingface_hub says what goes into which shard. Its save_torch_state_dict (2.4) removes the earlier files first, so
# that a kill leaves none (40 of 40), and refuses views of a larger tensor: hence a folder of unfinished files, and
# copies, of a shard at a time.
def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes config.json and the weights (tensors from any device), all of it or nothing; returns the folder.

    The weights are model.safetensors, or files of at most shard_bytes each (a larger tensor is one alone) with their
    index, as transformers has them. end_of_text: of a model that generates, for generation_config.json (None: no such
    file). OSError: the folder cannot be made or written, or the disk is full; earlier files there stay as they were.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=shard_bytes)
    texts = {CONFIG: config}
    if end_of_text is not None:
        texts[GENERATION] = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    if split.is_sharded:
        texts[INDEX] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    with TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
        for file, names in split.filename_to_tensors.items():
            shard = {name: _compact(tensors[name]) for name in names}
            save_file(shard, Path(unfinished, file), metadata={"format": "pt"})
        for file, content in texts.items():
            Path(unfinished, file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        # Without a config.json there is no model: a kill from here on leaves no mixture of an earlier one and this.
        for earlier in (folder / CONFIG, folder / INDEX, folder / WEIGHTS, *folder.glob(SHARDS)):
            earlier.unlink(missing_ok=True)
        for name in (*split.filename_to_tensors, *reversed(texts)):
            Path(unfinished, name).replace(folder / name)
    return folder


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in memory of its own: safetensors takes no two parts of one."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def files_of_weights(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the one that the path is. UserError: none, or weights of another kind."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{path.name} is not a safetensors file: expected one, or a folder with one.")
        return [path]
    if (path / INDEX).is_file():  # whatever it says, its files are in this folder
        return sorted({path / Path(name).name for name in read_json(path / INDEX)["weight_map"].values()})
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    raise UserError(f"no {WEIGHTS} in {path}: expected it, or its shards and {INDEX}.")


def check_architecture(
    content: Mapping[str, Any],
    kinds: Iterable[str],
    computation: Mapping[str, Sequence[Any]],
    where: str | Path,
) -> None:
    """UserError for a transformers config.json of another architecture, or another computation, than is read.

    kinds: the model_types that are read. computation: what the file may say of each entry, absent meaning the first.
    """
    given = content.get("model_type", "no model_type")
    if given not in kinds:
        raise UserError(f"{where} holds another architecture: model_type {given}: expected {', '.join(kinds)}.")
    for name, possible in computation.items():
        if content.get(name, possible[0]) not in possible:
            raise UserError(
                f"{where}: {name}={content[name]} in {CONFIG} is not what our model computes: expected "
                f"{' or '.join(map(str, possible))}."
            )


Part = tuple[str, int]  # the name of a tensor, and its rows


def converted(
    tensors: Mapping[str, Tensor],
    make: Callable[[], nn.Module],
    parts_of: Callable[[str, int], Sequence[Part]],
    where: str | Path,
) -> dict[str, Tensor]:
    """The state dict of the model that `make` builds, from transformers' tensors.

    parts_of: of one of ours, of so many rows, the tensors that it is made of, one below the other. Rows of ours beyond
    them are zero: those of an embedding table that stand for no token. UserError naming a tensor that is missing
    (None), one too many, or of another shape than config.json says.
    """
    with torch.device("meta"):  # none of it takes memory
        ours = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    parts = {name: parts_of(name, shape[0]) for name, shape in ours.items()}
    _check_shapes(tensors, {part: (rows, *ours[name][1:]) for name in ours for part, rows in parts[name]}, where)
    state = {}
    for name, shape in ours.items():
        pieces = [tensors[part] for part, _ in parts[name]]
        added = shape[0] - sum(len(piece) for piece in pieces)
        pieces += [pieces[0].new_zeros(added, *shape[1:])] if added else []
        state[name] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return state


def _check_shapes(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str | Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for name in [*expected, *sorted(shapes)]:
        if shapes.get(name) != expected.get(name):
            raise UserError(
                f"{where}: '{name}' has the shape {shapes.get(name)} where {CONFIG} calls for {expected.get(name)}."
            )
