"""flashtrain's own export: any of its models as model.safetensors and a config.json that says what model it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashtrain import models
from flashtrain.errors import UserError, unknown
from flashtrain.integrations.weight_files import write_folder

FORMAT = "flashtrain"
# Each kind of model by the name it has in config.json: (its configuration, the module), names of flashtrain.models.
MODELS = {"gpt2": ("GPT2Config", "GPT2"), "bert": ("BertConfig", "Bert")}
OWN = "flashtrain's own layout: flashtrain.integrations' load_decoder or load_bert reads it"


def save_weights(model: Any, folder: str | Path) -> str:
    """Writes folder/model.safetensors (the state dict, in its own dtype) and folder/config.json; returns, in words,
    which layout that is. load_decoder and load_bert read it.

    UserError: a model of an unknown kind. OSError: a folder that cannot be written.
    """
    for name, (_, module) in MODELS.items():
        if isinstance(model, getattr(models, module)):
            config = {"format": FORMAT, "model": name, "config": asdict(model.config)}
            write_folder(folder, config, model.state_dict())
            return OWN
    raise unknown("kind of model to export", type(model).__name__, (module for _, module in MODELS.values()))


def own_config(content: Mapping[str, Any], kind: str, where: str | Path) -> Any:
    """The configuration of a model of this kind in a config.json that save_weights wrote; None in another program's.

    UserError: it is of another kind.
    """
    if content.get("format") != FORMAT:
        return None
    if content["model"] != kind:
        raise UserError(f"{where} holds a {content['model']}: expected a {kind}.")
    return getattr(models, MODELS[kind][0])(**content["config"])
