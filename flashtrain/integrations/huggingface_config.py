"""The configuration of a transformers decoder, with a run's changes (model.options)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from flashtrain.errors import UserError, unknown
from flashtrain.files.json_files import read_json
from flashtrain.files.shipped import conf_folder
from flashtrain.integrations.weight_files import CONFIG

ROTARY = "rope_parameters"
# Entries in older files, now in ROTARY.
OLDER_ROTARY = ("rope_scaling", "rope_theta", "partial_rotary_factor")


def published_shapes() -> dict[str, dict[str, Any]]:
    """Return the published models of conf/decoder_shapes.yaml: name -> entries of its
    transformers configuration."""
    return yaml.safe_load((conf_folder() / "decoder_shapes.yaml").read_text(encoding="utf-8"))


def read_config(path: str, changes: Mapping[str, Any], setting: str = "model.path") -> Any:
    """Read a transformers configuration.

    Args:
        path: A folder, a config.json, a name of published_shapes, or a model type ("llama")
            for its default sizes.
        changes: Entries that replace the configuration's; of nested rotary entries only
            those given are replaced.
        setting: The name of the setting that gave `path`, for messages.

    Raises:
        UserError: The model is not a decoder of transformers, or `changes` names an unknown entry.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    where = Path(path).expanduser()
    shapes = {} if where.suffix == ".json" or where.exists() else published_shapes()
    where = where / CONFIG if where.is_dir() else where
    content = shapes.get(path, {"model_type": path}) if shapes else read_json(where)
    # Infinite steps of Mamba-2: {"__float__": "Infinity"}
    content = PreTrainedConfig._decode_special_floats(content)
    kind: Any = content.get("model_type")
    if kind not in DECODERS:  # a model's own code (auto_map) is never run
        raise unknown(
            f"kind of decoder in {setting}",
            str(kind),
            [*DECODERS, *shapes],
            listed=[*shapes, "llama", "qwen3", "..."],
        )
    _check_names(kind, content, changes)
    if {**content, **changes}.get("quantization_config") is not None:
        raise UserError(
            f"{setting}={path} has quantized weights, which cannot be trained: "
            "expected the same model in bfloat16."
        )
    content = {
        name: value for name, value in content.items() if name not in ("auto_map", "model_type")
    }
    if ROTARY in changes:
        content, changes = _with_rotary(kind, content, changes)
    config = AutoConfig.for_model(kind, **{**content, **changes})
    for name in ("sliding_window", "attention_chunk_size"):
        size, kinds = vars(config).get(name), set(vars(config).get("layer_types") or [""])
        # transformers' masks hide all tokens.
        if isinstance(size, int) and size < 1 and kinds != {"full_attention"}:
            raise UserError(
                f"{setting}={path} has {name}={size}: expected at least 1 token, or null for "
                f"layers that see all earlier ones. Set +model.options={{{name}: null}}."
            )
    return config


def _check_names(kind: str, content: Mapping[str, Any], changes: Iterable[str]) -> None:
    """Raise UserError for a change of an unknown entry: transformers accepts any name
    and ignores unknown ones."""
    from transformers import AutoModelForCausalLM, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = CONFIG_MAPPING[kind]
    fields = inspect.signature(own).parameters
    known = {*content, *fields, *own.attribute_map, "experts_implementation"} - {"model_type"}
    modelling = inspect.getsource(inspect.getmodule(AutoModelForCausalLM._model_mapping[own]))  # type: ignore
    # Such as Qwen3-MoE's head_dim.
    known |= set(re.findall(r'getattr\((?:\w+\.)*config, "(\w+)"', modelling))
    known -= {*OLDER_ROTARY} if ROTARY in fields else set()
    # Older names, which a class reads from further keyword arguments.
    classes = [
        one
        for one in own.__mro__
        if issubclass(one, PreTrainedConfig) and one is not PreTrainedConfig
    ]
    sources = "".join(map(inspect.getsource, classes))
    for name in changes:
        if name not in known and f'"{name}"' not in sources:
            listed = fields.keys() - inspect.signature(PreTrainedConfig).parameters
            raise unknown(f"{own.__name__} entry in model.options", name, known, listed=listed)


def _with_rotary(
    kind: str, content: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[dict, dict]:
    """Return (content, changes) with the rotary entries of both moved into the changes, where the
    model's own base and length complete the given ones."""
    from transformers import AutoConfig

    others = {name: value for name, value in changes.items() if name != ROTARY}
    trained = {name: value for name, value in content.items() if name == "max_position_embeddings"}
    config = AutoConfig.for_model(kind, **{**content, **others, **trained})
    config.rope_parameters = _rotary_with(config.rope_parameters or {}, changes[ROTARY])
    config.standardize_rope_params()
    content = {
        name: value for name, value in content.items() if name not in (ROTARY, *OLDER_ROTARY)
    }
    return content, {**others, ROTARY: config.rope_parameters}


def _rotary_with(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's rotary entries `own` with the given ones in their place; where each kind
    of layer has entries of its own, those of a kind."""
    from transformers.modeling_rope_utils import RopeParameters

    kinds = {name for name, value in own.items() if isinstance(value, dict)}
    known = kinds or {*own, *RopeParameters.__annotations__}
    for name in given.keys() - known:
        raise unknown("rotary entry in model.options", name, known)
    return {
        **own,
        **{
            name: _rotary_with(own[name], one) if name in kinds else one
            for name, one in given.items()
        },
    }
