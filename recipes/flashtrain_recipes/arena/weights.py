"""A trained classifier in one file: safetensors with the model's shape in its metadata, or
a checkpoint of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.files.disk import replacing
from flashtrain.integrations.weight_files import cut_off, read_tensors
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.training.checkpoints import read_checkpoint, weights_in
from flashtrain_recipes.arena.build import TASK

KEY = "flashtrain"  # of the metadata: a JSON object
SUFFIX = ".safetensors"
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


@dataclass
class SavedClassifier:
    """A classifier as a file holds it: configuration, weights, and a dictionary of
    notes on its training."""

    config: ClassifierConfig
    state: dict[str, Tensor]
    notes: dict[str, Any]  # recipe, data, contour, stage and step of its training
    path: Path


def read_classifier(path: str | Path) -> SavedClassifier:
    """Return the classifier in a .safetensors file of flashtrain or in a checkpoint.
    Raises UserError for other files."""
    path = Path(path).expanduser()
    if path.suffix == SUFFIX:
        notes = read_notes(path)
        state = {name: tensor.float() for name, tensor in read_tensors(path).items()}
    else:
        saved = read_checkpoint(path)
        otherwise = f"{path} holds no classifier: it was not written by a run with task={TASK}."
        notes = {**_of_classifier(saved.get(KEY), otherwise), "step": saved["global_step"]}
        state = weights_in(saved, path)
    notes.setdefault("step", 0)
    return SavedClassifier(ClassifierConfig(**notes.pop("shape")), state, notes, path)


def read_notes(path: str | Path) -> dict[str, Any]:
    """Return what a classifier's .safetensors file says about its shape and training.
    Raises UserError for other files."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"weights={path}: no such file. Expected a .safetensors file.")
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(KEY, "null")
    except SafetensorError as error:
        raise cut_off(path, error) from error
    otherwise = f"{path} does not say which classifier it holds: mode=export writes files that do."
    return _of_classifier(json.loads(found), otherwise)


def write_classifier(
    saved: SavedClassifier, path: str | Path, *, precision: str = "float32"
) -> Path:
    """Write the classifier as a .safetensors file, whole or not at all, and return the path;
    precision: the weights' dtype in the file, a name of PRECISIONS."""
    path = Path(path)
    tensors = {
        name: value.to(PRECISIONS[precision]).contiguous() for name, value in saved.state.items()
    }
    notes = {**saved.notes, "task": TASK, "shape": asdict(saved.config)}
    with replacing(path) as unfinished:
        save_file(
            tensors, unfinished, metadata={"format": "pt", KEY: json.dumps(notes, sort_keys=True)}
        )
    return path


def _of_classifier(notes: Any, otherwise: str) -> dict[str, Any]:
    if not notes or notes.get("task") != TASK:
        raise UserError(otherwise)
    return dict(notes)
