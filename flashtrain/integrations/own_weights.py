"""flashtrain's own export: any of its models as model.safetensors and a config.json that says what model it is.

save_weights(model, "exported")
config, state_dict = load_weights("exported")
model = GPT2(config)
model.load_state_dict(state_dict)
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain import models
from flashtrain.errors import UserError, unknown
from flashtrain.integrations.weight_files import CONFIG, read_folder, read_json, write_folder

FORMAT = "flashtrain"
# Each kind of model by the name it has in config.json: (its configuration, the module), names of flashtrain.models.
MODELS = {"gpt2": ("GPT2Config", "GPT2"), "bert": ("BertConfig", "Bert")}


def save_weights(model: Any, folder: str | Path) -> Path:
    """Writes folder/model.safetensors (the state dict, in its own dtype) and folder/config.json; returns the folder.

    UserError: a model of an unknown kind. OSError: a folder that cannot be written.
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

    kind: of the model that is expected, a name of MODELS. What does not fit the configuration is found by
    load_state_dict. UserError: nothing there, weights of another program or kind.
    """
    content, tensors = read_folder(folder_or_file)
    if content.get("format") != FORMAT:
        raise UserError(
            f"{folder_or_file} was not exported by flashtrain ({CONFIG} has no format={FORMAT}): load_decoder and "
            "load_bert read Hugging Face's weights."
        )
    if content["model"] != kind:
        raise UserError(f"{folder_or_file} holds a {content['model']}: expected a {kind}.")
    return getattr(models, MODELS[kind][0])(**content["config"]), tensors
