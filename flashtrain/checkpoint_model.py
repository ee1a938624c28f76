"""A trained model back from a checkpoint or from Hugging Face weights, and how a checkpoint says which model it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch

from flashtrain.components import make_model
from flashtrain.data.tokenizers import Tokenizer, load_tokenizer
from flashtrain.errors import UserError
from flashtrain.integrations import load_gpt2
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.models.trainable import Trainable
from flashtrain.run_folder import BEST, TOKENIZER, find_checkpoint, read_settings
from flashtrain.settings import Settings
from flashtrain.training.checkpoints import read_checkpoint, weights_in


@dataclass
class TrainedModel:
    """The model in a run folder, ready to evaluate, generate with or export."""

    model: Trainable
    tokenizer: Tokenizer
    folder: Path
    checkpoint: Path
    step: int


def build_model(settings: Settings, *, vocab_size: int, attention: str) -> Trainable:
    """A model to train: with random weights, or starting from `weights` (Hugging Face GPT-2).

    Raises UserError where the weights' model cannot serve the settings.
    """
    if settings.weights is None:
        return make_model(settings, vocab_size=vocab_size, attention=attention)
    config, state = load_gpt2(Path(settings.weights).expanduser(), vocab_rows=settings.model.vocab_rows)
    if settings.context > config.context:
        raise UserError(
            f"context={settings.context} is longer than the {config.context} positions that the weights in "
            f"{settings.weights} were trained with: choose context={config.context} or less."
        )
    if vocab_size != config.vocab_size:
        raise UserError(
            f"the weights in {settings.weights} know {config.vocab_size} tokens and the tokenizer makes {vocab_size}: "
            "GPT-2's weights need data.tokenizer=gpt2."
        )
    model = GPT2(config, attention=attention)
    model.load_state_dict(state)
    return model


def describe_model(model: Trainable, settings: Settings, *, vocab_size: int) -> dict[str, Any]:
    """What a checkpoint says of its model, in plain values: enough to rebuild it and to notice another one."""
    config = getattr(model, "config", None)
    shape = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    return {"name": settings.model.name, "size": settings.model.size, "vocab_size": vocab_size, "shape": shape}


def check_same_model(checkpoint: Path, description: dict[str, Any]) -> None:
    """Raise UserError unless the checkpoint holds the model described, naming what differs."""
    saved = read_checkpoint(checkpoint).get("flashtrain", {})
    here = {"name": description["name"], **description["shape"]}
    there = {"name": saved.get("name"), **saved.get("shape", {})}
    differing = [key for key in here if here[key] != there.get(key)]
    if differing:
        parts = ", ".join(f"{key} is {there.get(key)} there and {here[key]} here" for key in differing)
        raise UserError(f"{checkpoint} is a checkpoint of another model: {parts}.")


def load_trained(given: str, *, attention: str) -> TrainedModel:
    """The model in a run folder (its best checkpoint) or in a checkpoint, on the CPU, in evaluation mode."""
    folder, path = find_checkpoint(given, prefer=BEST)
    settings = read_settings(folder)
    saved = read_checkpoint(path)
    description = saved.get("flashtrain")
    if not isinstance(description, dict):
        raise UserError(f"{path} was not written by flashtrain: it does not say which model it holds.")
    if description["name"] in ("gpt2", "modern"):
        model: Trainable = GPT2(GPT2Config(**description["shape"]), attention=attention)
    else:
        model = make_model(settings, vocab_size=description["vocab_size"], attention=attention)
    try:
        model.load_state_dict(weights_in(saved, path, prefix="model."))
    except RuntimeError as error:
        raise UserError(f"{path} does not fit its model: {str(error).splitlines()[0]}") from error
    tokenizer = load_tokenizer(folder / TOKENIZER)
    step = int(saved.get("global_step", 0))
    return TrainedModel(model.eval(), tokenizer, folder, path, step)


def move(model: Trainable, kind: str, precision: str) -> Trainable:
    """The model on the device, in the precision's own dtype where that is not a mixed one."""
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision)
    return model.to(device=kind, dtype=dtype)
