"""Reading and writing a transformers model's folder, on this machine or on the hub.

A model is built on the meta device, sharded or not; then each rank reads its own shards, tensor by
tensor. No code of a folder is run, and no pickle is read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flashtrain.announce import say
from flashtrain.data.tokenizers import Tokenizer, huggingface_tokenizer
from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json
from flashtrain.integrations.weight_files import (
    CONFIG,
    GENERATION,
    INDEX,
    cut_off,
    files_of_weights,
)

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")  # a repository's files without its weights
# What clients of HTTP raise where nobody answers.
_UNREACHABLE = {"ConnectError", "ConnectionError", "Timeout", "TimeoutException"}


def folder_of(path: str, *weights: str) -> Path:
    """Return a model's local folder: the path itself, or where the files of a hub
    name were downloaded to.

    Args:
        path: Folder, or name on the hub.
        weights: Patterns of further files to download, such as "*.safetensors".

    Raises:
        UserError: There is no such folder, nor such a name on the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    unreachable = None
    try:  # snapshot_download would wait for minutes
        HfApi().model_info(path, timeout=constants.HF_HUB_ETAG_TIMEOUT)  # 10 s, or the user's
    except Exception as problem:  # noqa: BLE001 - each client of HTTP has its own
        if _UNREACHABLE & {one.__name__ for one in type(problem).__mro__}:
            unreachable = problem
    try:
        wanted = [*DESCRIPTIONS, *weights]
        local = unreachable is not None
        found = Path(snapshot_download(path, allow_patterns=wanted, local_files_only=local))
        if unreachable is not None and not isinstance(unreachable, errors.OfflineModeIsEnabled):
            _say_copy(path, found)
        return found
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        from flashtrain.integrations.huggingface_config import published_shapes

        raise UserError(
            f"model.path={path}: no such folder, and the hub reports: "
            f"{first_line(unreachable or error)}. If it is a run's base that has moved, add "
            "model.path=FOLDER (and in place of model.path=RUN model.adapter_path=RUN). A plan "
            f"needs no files: model.config=NAME has the shape of {', '.join(published_shapes())}, "
            "or of a config.json."
        ) from error


@cache
def _say_copy(path: str, found: Path) -> None:
    say(f"model.path={path}: the hub was not reached, so its copy here is read: {found}")


def tokenizer_of(path: str | None, *, begin_of_text: bool = True) -> Tokenizer:
    """Load the tokenizer of a model's folder or hub name; for begin_of_text see
    huggingface_tokenizer."""
    if path is None:
        raise UserError(
            "data.tokenizer=huggingface reads the model's tokenizer. "
            "Set model.path=FOLDER_OR_HUB_NAME."
        )
    return huggingface_tokenizer(folder_of(path), begin_of_text=begin_of_text)


def end_ids(folder: Path) -> list[int]:
    """Read the token ids that end a model's text from generation_config.json,
    else from config.json."""
    for file in (folder / GENERATION, folder / CONFIG):
        given = read_json(file).get("eos_token_id") if file.is_file() else None
        if given is not None:
            return given if isinstance(given, list) else [given]
    return []


def add_end_ids(folder: Path, ids: Sequence[int]) -> None:
    """Add token ids that end generated text (in transformers and vLLM) to the
    configuration of an exported model."""
    file = folder / GENERATION
    if ids and file.is_file():  # an export for transformers
        content = read_json(file)
        # With this entry transformers 4 reads config.json instead.
        content.pop("_from_model_config", None)
        content["eos_token_id"] = list(dict.fromkeys([*end_ids(folder), *ids]))
        write_atomically(file, json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def opened_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Open a folder's safetensors files as {tensor name: lazy tensor}; UserError for
    missing or truncated files."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files_of_weights(folder):
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            except SafetensorError as error:
                raise cut_off(file, error) from error
            found.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118 - no dictionary
        yield found


def read_weights(model: Any, folder: Path, device: torch.device) -> None:
    """Read a folder's weights into a transformers model on the meta device, in the model's dtypes.

    Args:
        model: The model; of its sharded parameters only this device's shards are read.
        folder: A folder with safetensors files.
        device: The device to put the weights on.

    Raises:
        UserError: The weights are of another model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    conversions: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": device}, weight_mapping=conversions)
    with opened_weights(folder) as tensors, without_bars():
        found = _with_rows(model, _joined(tensors, conversions), folder)
        loaded, _ = convert_and_load_state_dict_in_model(model, found, options)
    optional = [
        *(model._keys_to_ignore_on_load_missing or ()),
        *map(re.escape, model.all_tied_weights_keys),
    ]
    missing = sorted(
        name for name in loaded.missing_keys if not any(re.search(one, name) for one in optional)
    )
    odd = sorted(name for name, *_ in loaded.mismatched_keys)
    for names, what in (
        (sorted(loaded.conversion_errors), "cannot be converted"),
        (missing, "is missing"),
        (odd, f"has another shape than {CONFIG} says"),
    ):
        if names:
            more = f", and so of {len(names) - 1} others" if len(names) > 1 else ""
            raise UserError(
                f"the weights in {folder} are of another model: '{names[0]}' {what}{more}."
            )
    tied = dict(model.all_tied_weights_keys)
    # Not where both are there and differ.
    model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
    if untied := sorted(tied.keys() - model.all_tied_weights_keys.keys()):
        raise UserError(
            f"'{untied[0]}' and '{tied[untied[0]]}' in {folder} differ, but {CONFIG} says that "
            "they are one matrix (tie_word_embeddings). Set +model.options={tie_word_embeddings: "
            "false} to train both."
        )
    model._adjust_missing_and_unexpected_keys(loaded)  # leaves what transformers warns of
    if unknown := sorted(loaded.unexpected_keys):
        say(
            f"{len(unknown)} weights in {folder} are not of the model that {CONFIG} describes: "
            f"'{unknown[0]}', ..."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    fill_buffers(model, device)


def _with_rows(model: Any, tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A file's tensors; where the model has more tokens than its folder, its embeddings and its
    head's with as many rows more, each the mean of theirs (transformers' draws around it)."""
    config, found = read_json(folder / CONFIG), dict(tensors)
    rows = model.config.vocab_size - config.get("vocab_size", model.config.vocab_size)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = [name for name, one in model.named_modules(remove_duplicate=False) if one in tables]
    for name in found if rows > 0 else ():
        module, _, kind = name.rpartition(".")
        if kind in ("weight", "bias") and any(f".{one}".endswith(f".{module}") for one in ends):
            old = found[name][...]
            mean = old.float().mean(dim=0, keepdim=True).to(old.dtype)
            found[name] = torch.cat([old, mean.expand(rows, *old.shape[1:])])
    return found


def _joined(tensors: dict[str, Any], conversions: Any) -> dict[str, Any]:
    """A file's tensors, with those joined that transformers joins along their rows: of a sharded
    model it would join this device's shards of each, which are not its shard of the whole."""
    found = dict(tensors)
    for one in conversions:
        parts = getattr(one, "operations", None) or ()
        of = [(type(part).__name__, getattr(part, "dim", None)) for part in parts]
        if of != [("Concatenate", 0)]:
            continue
        first, *others = one.source_patterns
        for name in [name for name in found if re.search(first, name)]:
            names = [name, *(re.sub(first, other, name) for other in others)]
            if all(each in found for each in names):
                whole = torch.cat([found.pop(each)[...] for each in names])
                found[re.sub(first, one.target_patterns[0], name)] = whole
    return found


@torch.no_grad()
def fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that files do not store (such as rotary frequencies) by
    transformers' own code."""
    _allocate_buffers(model, device)
    marked = [one for one in model.parameters() if not getattr(one, "_is_hf_initialized", False)]
    for parameter in marked:
        parameter._is_hf_initialized = True
    model.initialize_weights()  # skips marked parameters


def _allocate_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers that are on the meta device memory on `device`, with no values yet."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def random_weights(model: Any, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Give a transformers model that is on the meta device random weights on `device`, drawn as its
    class draws them.

    Layers are drawn one after the other from torch's seed, so that it gives the same weights
    however the model is sharded.
    """
    done: set[int] = set()
    # Each module is initialized by the innermost model around it, as in transformers.
    owner = {
        one: part
        for part in model.modules()
        if hasattr(part, "_init_weights")
        for one in part.modules()
    }
    _allocate_buffers(model, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed())
        for unit in (*layers, model):
            with allocated(unit, device):
                # Children before parents, as in transformers.
                for module in reversed(list(unit.modules())):
                    if id(module) not in done:
                        owner[module]._init_weights(module)
                        done.add(id(module))


def shards_of(model: Any, weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return these weights on `device`; of the model's sharded parameters this device's shards."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return {name: _part(one.to(device), own.get(name, one)) for name, one in weights.items()}


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' progress bars within a `with` block."""
    from transformers.utils import logging

    shown_before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            logging.enable_progress_bar()


@contextmanager
def allocated(unit: nn.Module, device: torch.device) -> Iterator[None]:
    """Allocate the meta parameters of a module, so that a `with` block can give them values.

    Args:
        unit: The module; its parameters are unsharded within the block, and
            sharded as before afterwards.
        device: The device to allocate the parameters on.
    """
    slots = [
        (one, name, old)
        for one in unit.modules()
        for name, old in one._parameters.items()
        if old is not None and old.device.type == "meta"
    ]
    given = {id(old): torch.empty(old.shape, dtype=old.dtype, device=device) for _, _, old in slots}
    for module, name, old in slots:
        module._parameters[name] = nn.Parameter(given[id(old)], requires_grad=old.requires_grad)
    yield
    placed: dict[int, nn.Parameter] = {}
    for module, name, old in slots:
        if id(old) not in placed:
            value = _part(given.pop(id(old)), old)
            placed[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
        module._parameters[name] = placed[id(old)]


def _part(value: Tensor, like: Tensor) -> Tensor:
    """Return the whole tensor `value` sharded as `like` is, if `like` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return value
    # src_data_rank=None: every rank has the whole value, and nothing is sent.
    sharded = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        sharded.to_local().clone(),
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
    )


def save_folder(model: Any, folder: Path, origin: Path | None) -> None:
    """Save a transformers model and its configuration for from_pretrained, as sharded safetensors.

    Args:
        model: The model.
        folder: The folder to write to.
        origin: The folder that the model was read from, whose tokenizer, chat template and
            generation_config.json are copied (None: copy nothing).
    """
    with without_bars():
        model.save_pretrained(folder)
    for file in (
        [] if origin is None else [one for pattern in DESCRIPTIONS for one in origin.glob(pattern)]
    ):
        if file.name not in (CONFIG, INDEX):
            shutil.copyfile(file, folder / file.name)
