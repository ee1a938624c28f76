"""A transformers model's folder or hub name: its configuration read, its weights into a model that has none, out again.

A model is built on the meta device, divided among devices or not, and then filled: each rank reads, tensor by tensor,
what it keeps (transformers' own reading of converted names, and of shards of a DTensor, does it). Random weights are
drawn a layer at a time, the same whatever the number of ranks. No code of a folder is run, and no pickle is read.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flashtrain.data.tokenizers import Tokenizer, huggingface_tokenizer
from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json
from flashtrain.integrations.weight_files import CONFIG, GENERATION, INDEX, cut_off, files_of_weights

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")  # all of a repository but its weights
OTHER_MIXERS = r"^Conv1d$|Mamba|SSM|DeltaNet|ShortConv|Rwkv|Recurrent|Linear\w*Attention|LightningAttention"
ROTARY = "rope_parameters"
OLDER_ROTARY = ("rope_scaling", "rope_theta", "partial_rotary_factor")  # entries of files, all of ROTARY now
PATIENCE = 3  # seconds that the hub has for an answer


def folder_of(path: str, *weights: str) -> Path:
    """The local folder of a model: `path` itself, or, for a name of the hub, its files as they were downloaded.

    weights: patterns of further files to have, such as "*.safetensors". UserError: neither; the hub's refusal.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise UserError(f"model.path={path}: no such folder: expected a folder with {CONFIG}, or a name of the hub.")
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=[*DESCRIPTIONS, *weights], etag_timeout=PATIENCE))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(f"model.path={path}: no such folder, and the hub says: {error}") from error


def tokenizer_of(path: str | None, *, begin_of_text: bool = True) -> Tokenizer:
    """The tokenizer beside a model. begin_of_text: see huggingface_tokenizer. UserError: none is there."""
    if path is None:
        raise UserError("data.tokenizer=huggingface is the one in the folder of model.path=..., which is not given.")
    return huggingface_tokenizer(folder_of(path), begin_of_text=begin_of_text)


def read_config(path: str, changes: Mapping[str, Any], setting: str = "model.path") -> Any:
    """The transformers configuration in a folder or a config.json, or that of a model type by itself ("llama").

    changes: entries in place of the file's; rotary ones that they leave out are the model's own. UserError: no
    configuration; one of a model that is no decoder, or runs code of its own; a change of what its kind has not.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    where = Path(path).expanduser()
    if where.is_dir():
        where = where / CONFIG
    if where.suffix == ".json" or where.exists():
        content = read_json(where)
    else:
        content = {"model_type": path}
    kind: Any = content.get("model_type")
    if kind not in DECODERS:
        if "auto_map" in content or kind is None:
            what = "its model is code of its own, not run" if "auto_map" in content else f"{CONFIG} names no model_type"
            raise UserError(
                f"{setting}={path}: {what}: expected one of transformers' decoders, such as llama or qwen3."
            )
        raise unknown("kind of decoder in transformers", kind, DECODERS, listed=["llama", "qwen3", "..."])
    _check_names(kind, content, changes)
    if {**content, **changes}.get("quantization_config") is not None:
        raise UserError(
            f"{setting}={path} holds quantised weights, which cannot be trained: expected the same model in bfloat16."
        )
    content = {name: value for name, value in content.items() if name not in ("auto_map", "model_type")}
    if ROTARY in changes:
        content, changes = _with_rotary(kind, content, changes)
    return AutoConfig.for_model(kind, **{**content, **changes})


def _check_names(kind: str, content: Mapping[str, Any], changes: Iterable[str]) -> None:
    """UserError for a change of an entry that neither the file nor its kind's configuration class has: transformers
    takes any name, and makes nothing of it."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = CONFIG_MAPPING[kind]
    fields = inspect.signature(own).parameters
    known = {*content, *fields, *own.attribute_map, "experts_implementation"} - {"model_type"}
    known -= {*OLDER_ROTARY} if ROTARY in fields else set()
    # Older names, which a class takes from what is no field of it.
    classes = [one for one in own.__mro__ if issubclass(one, PreTrainedConfig) and one is not PreTrainedConfig]
    sources = "".join(map(inspect.getsource, classes))
    for name in changes:
        if name not in known and f'"{name}"' not in sources:
            listed = fields.keys() - inspect.signature(PreTrainedConfig).parameters
            raise unknown(f"{own.__name__} entry in model.options", name, known, listed=listed)


def _with_rotary(kind: str, content: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[dict, dict]:
    """(content, changes) with all rotary entries in the changes' rope_parameters, those that they leave out from the
    model's own: its base, and the length that it was trained with."""
    from transformers import AutoConfig

    others = {name: value for name, value in changes.items() if name != ROTARY}
    trained = {name: value for name, value in content.items() if name == "max_position_embeddings"}
    config = AutoConfig.for_model(kind, **{**content, **others, **trained})
    config.rope_parameters = _rotary_with(config.rope_parameters or {}, changes[ROTARY])
    config.standardize_rope_params()
    content = {name: value for name, value in content.items() if name not in (ROTARY, *OLDER_ROTARY)}
    return content, {**others, ROTARY: config.rope_parameters}


def _rotary_with(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """own rotary entries, or those of each kind of layer, with the given ones in their place."""
    from transformers.modeling_rope_utils import RopeParameters

    kinds = {name for name, value in own.items() if isinstance(value, dict)}
    known = kinds or {*own, *RopeParameters.__annotations__}
    for name in given.keys() - known:
        raise unknown("rotary entry in model.options", name, known)
    return {**own, **{name: _rotary_with(own[name], one) if name in kinds else one for name, one in given.items()}}


def end_ids(folder: Path) -> list[int]:
    """All of eos_token_id in a model's generation_config.json, or in its config.json where that names none."""
    for file in (folder / GENERATION, folder / CONFIG):
        given = read_json(file).get("eos_token_id") if file.is_file() else None
        if given is not None:
            return given if isinstance(given, list) else [given]
    return []


def add_end_ids(folder: Path, ids: Sequence[int]) -> None:
    """Let what transformers and vLLM write with an exported model end at these ids too."""
    file = folder / GENERATION
    if ids and file.is_file():  # transformers reads the export
        content = read_json(file)
        content.pop("_from_model_config", None)  # of which transformers 4 would go by config.json
        content["eos_token_id"] = list(dict.fromkeys([*end_ids(folder), *ids]))
        write_atomically(file, json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def opened_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a folder's safetensors by name, none of them read yet. UserError: no such files, cut off ones."""
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
    """Give a transformers model on the meta device a folder's weights, in the model's dtypes: of a parameter that is
    divided among devices, this device's part alone. UserError: weights that are not this model's."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    conversions: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": device}, weight_mapping=conversions)
    with opened_weights(folder) as tensors, without_bars():
        told, _ = convert_and_load_state_dict_in_model(model, tensors, options)
    optional = [*(model._keys_to_ignore_on_load_missing or ()), *map(re.escape, model.all_tied_weights_keys)]
    missing = sorted(name for name in told.missing_keys if not any(re.search(one, name) for one in optional))
    odd = sorted(name for name, *_ in told.mismatched_keys)
    for names, what in (
        (sorted(told.conversion_errors), "cannot be converted"),
        (missing, "is missing"),
        (odd, f"has another shape than {CONFIG} says"),
    ):
        if names:
            more = f", and so of {len(names) - 1} others" if len(names) > 1 else ""
            raise UserError(f"the weights in {folder} are of another model: '{names[0]}' {what}{more}.")
    model.tie_weights(missing_keys=told.missing_keys, recompute_mapping=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    fill_buffers(model, device)


@torch.no_grad()
def fill_buffers(model: Any, device: torch.device) -> None:
    """Give the model the buffers that stand in no file (rotary angles and the like), as transformers computes them."""
    _make_buffers(model, device)
    marked = [one for one in model.parameters() if not getattr(one, "_is_hf_initialized", False)]
    for parameter in marked:
        parameter._is_hf_initialized = True
    model.initialize_weights()  # passes over every parameter that is marked


def _make_buffers(model: nn.Module, device: torch.device) -> None:
    """Memory for those that have none."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def random_weights(model: Any, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Give a transformers model on the meta device the random weights of its class, a layer at a time: the same for
    the same seed, whatever number of devices they are divided among."""
    done: set[int] = set()
    _make_buffers(model, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed())
        for unit in (*layers, model):
            with whole(unit, device):
                for module in reversed(list(unit.modules())):  # children before their parents, as transformers does
                    if id(module) not in done:
                        model._init_weights(module)
                        done.add(id(module))


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers shows no progress of its own."""
    from transformers.utils import logging

    shown_before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            logging.enable_progress_bar()


@contextmanager
def whole(unit: nn.Module, device: torch.device) -> Iterator[None]:
    """The parameters of `unit` that have no memory yet, whole, on the device; at the end each as it was before, but
    with the values that it was given: of a divided one, this device's part."""
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
    """The value, divided as `like` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return value
    # src_data_rank=None: every rank has the whole value, and nothing is sent.
    divided = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        divided.to_local().clone(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def check_architecture(model: Any, layers: Sequence[nn.Module], path: str) -> None:
    """UserError where a layer mixes tokens by something else than attention that calls transformers' interface."""
    from flashtrain.integrations.huggingface_architectures import attention_calls

    calls = attention_calls(type(model), model.config)
    if calls is not None and (calls == 0 or calls % len(layers)):
        raise UserError(
            f"{path}: a forward of {type(model).__name__} calls transformers' registered attention {calls} times in "
            f"{len(layers)} layers: expected a model whose every layer is such attention."
        )
    names = {type(one).__name__ for layer in layers for one in layer.modules()}
    other = sorted(name for name in names if re.search(OTHER_MIXERS, name))
    if other or not any("Attention" in name for name in names):
        raise UserError(
            f"{path}: {type(model).__name__} mixes tokens by {', '.join(other) or 'no attention'}, which knows no "
            "packed documents and no shared sequence: expected a model whose every layer is attention."
        )


def save_folder(model: Any, folder: Path, origin: Path | None) -> None:
    """Write a transformers model as sharded safetensors that from_pretrained loads, with its configuration.

    origin: the folder that it was read from, whose tokenizer, chat template and generation_config.json are kept.
    """
    with without_bars():
        model.save_pretrained(folder)
    for file in [] if origin is None else [one for pattern in DESCRIPTIONS for one in origin.glob(pattern)]:
        if file.name not in (CONFIG, INDEX):
            shutil.copyfile(file, folder / file.name)
