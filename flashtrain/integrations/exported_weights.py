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

from flashtrain.errors import UserError, unknown
from flashtrain.integrations.described_models import check_stored, described_config, shapes_of
from flashtrain.integrations.safetensors_files import CONFIG, check_tensors, read_folder, read_json, write_folder
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.models.gpt2 import GPT2, GPT2Config

FORMAT = "flashtrain"
# Each kind of model by the name it has in config.json: (its configuration, the module).
MODELS: dict[str, tuple[type[Any], type[Any]]] = {"gpt2": (GPT2Config, GPT2), "bert": (BertConfig, Bert)}


def save_weights(model: GPT2 | Bert, folder: str | Path) -> Path:
    """Writes folder/model.safetensors (the state dict, in its own dtype) and folder/config.json; returns the folder.

    UserError: a model of an unknown kind, a folder that cannot be written.
    """
    for name, (_, module) in MODELS.items():
        if isinstance(model, module):
            config = {"format": FORMAT, "model": name, "config": asdict(model.config)}
            return write_folder(folder, config, model.state_dict())
    raise unknown("kind of model to export", type(model).__name__, (module.__name__ for _, module in MODELS.values()))


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
    config_class, module = MODELS[name]
    where = f"{folder_or_file}/{CONFIG}" if Path(folder_or_file).is_dir() else f"the {CONFIG} beside {folder_or_file}"
    config = described_config(config_class, content.get("config"), tensors, where)
    check_stored(tensors, str(folder_or_file))
    check_tensors(tensors, shapes_of(lambda: module(config, attention="sdpa"), where), folder_or_file)
    return config, tensors
