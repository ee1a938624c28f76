"""A trained classifier in one file: safetensors with the model's shape in its metadata, or a checkpoint of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashtrain.classification.build import TASK
from flashtrain.errors import UserError, unknown
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.training.checkpoints import read_checkpoint, weights_in

KEY = "flashtrain"  # of the metadata: a JSON object
SUFFIX = ".safetensors"
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


@dataclass
class SavedClassifier:
    """config and state rebuild the model; notes: recipe, data, contour, stage, step of its training."""

    config: ClassifierConfig
    state: dict[str, Tensor]
    notes: dict[str, Any]
    path: Path


def read_classifier(path: str | Path) -> SavedClassifier:
    """The classifier in a .safetensors file of ours, or in a checkpoint. UserError: anything else."""
    path = Path(path).expanduser()
    if path.suffix == SUFFIX:
        notes, state = _read_safetensors(path)
    else:
        saved = read_checkpoint(path)
        notes = dict(saved.get(KEY) or {})
        if notes.get("task") != TASK:
            raise UserError(f"{path} holds no classifier: it was not written by a run with task=classification.")
        state = weights_in(saved, path, prefix="model.")
        notes["step"] = int(saved.get("global_step", 0))
    return SavedClassifier(_config(notes.pop("shape", None), path), state, notes, path)


def read_notes(path: str | Path) -> dict[str, Any]:
    """What a .safetensors file of ours says of its classifier. UserError: it is none."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"there is no weights file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(KEY)
        notes = json.loads(found) if found else None
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {' '.join(str(error).split())}.") from error
    if not isinstance(notes, dict) or notes.get("task") != TASK:
        raise UserError(f"{path} does not say which classifier it holds: mode=export writes files that do.")
    return notes


def write_classifier(saved: SavedClassifier, path: str | Path, *, precision: str = "float32") -> Path:
    """Write the classifier as safetensors, whole or not at all. precision: "float32", or "float16" for half the size
    (weights beyond its range, or that it would round by more than 2^-11 of their size, do not occur in models of this
    size). UserError: an unknown precision, a file that cannot be written."""
    if precision not in PRECISIONS:
        raise unknown("weights precision", precision, PRECISIONS)
    path = Path(path)
    tensors = {name: value.to(PRECISIONS[precision]).contiguous() for name, value in saved.state.items()}
    notes = {**saved.notes, "task": TASK, "shape": asdict(saved.config)}
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata={"format": "pt", KEY: json.dumps(notes, sort_keys=True)})
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {' '.join(str(error).split())}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    notes = read_notes(path)
    with safe_open(path, framework="pt") as file:
        return notes, {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - no mapping


def _config(shape: Any, path: Path) -> ClassifierConfig:
    known = {field.name for field in fields(ClassifierConfig)}
    if not isinstance(shape, dict) or not {"classes", "length"} <= shape.keys() <= known:
        raise UserError(f"{path} does not say the shape of its classifier, or one that this version does not know.")
    return ClassifierConfig(**shape)
