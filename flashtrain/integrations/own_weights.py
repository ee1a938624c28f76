"""flashtrain's own weight format: model.safetensors with a config.json from which
the model can be rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashtrain import models
from flashtrain.errors import UserError, unknown
from flashtrain.integrations.weight_files import write_folder

FORMAT = "flashtrain"
# Models by their name in config.json: (configuration class, module class), names
# in flashtrain.models.
MODELS = {"gpt2": ("DecoderConfig", "Decoder"), "bert": ("BertConfig", "Bert")}
OWN = "flashtrain's own format: flashtrain.integrations' load_decoder or load_bert reads it"


def save_weights(model: Any, folder: str | Path) -> str:
    """Save a flashtrain model as model.safetensors (its state dict, in its dtype) and config.json.

    Returns:
        The name of the format, in words; load_decoder and load_bert read it.

    Raises:
        UserError: The model is of an unknown kind.
        OSError: The folder cannot be written.
    """
    for name, (_, module) in MODELS.items():
        if isinstance(model, getattr(models, module)):
            own = model.config.plain() if name == "gpt2" else asdict(model.config)
            config = {"format": FORMAT, "model": name, "config": own}
            write_folder(folder, config, model.state_dict())
            return OWN
    names = [module for _, module in MODELS.values()]
    known = unknown("kind of model to export", type(model).__name__, names)
    raise UserError(f"{known} Another class defines save(folder): docs/extend/add-a-model.md.")


def own_config(content: Mapping[str, Any], kind: str, where: str | Path) -> Any:
    """Return the model configuration from a config.json of save_weights; None if another
    program wrote the file.

    Args:
        content: The content of config.json.
        kind: The expected kind of model; UserError for another one.
        where: The file or folder, for messages.
    """
    if content.get("format") != FORMAT:
        return None
    if content["model"] != kind:
        raise UserError(f"{where} contains a {content['model']}: expected a {kind}.")
    form = getattr(models, MODELS[kind][0])
    return form.of_plain(content["config"]) if kind == "gpt2" else form(**content["config"])
