"""A trained classifier in one file: safetensors with the model's shape in its metadata, or a checkpoint of a run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashtrain.errors import UserError, unknown
from flashtrain.files.foreign_files import parse_json
from flashtrain.integrations.weight_files import check_weights, described_config, read_tensors, shown, trained_steps
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import DENSE, ClassifierConfig
from flashtrain.training.checkpoints import read_checkpoint, weights_in
from flashtrain_recipes.arena.build import TASK

KEY = "flashtrain"  # of the metadata: a JSON object
SUFFIX = ".safetensors"
MOST_BLOCKS = 8192  # of a pattern, which lists pairs of them
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
        notes = _checked(saved.get(KEY), f"{path} holds no classifier: it was not written by a run with task={TASK}.")
        state = weights_in(saved, path, prefix="model.")
        notes["step"] = trained_steps(saved, path)
    notes.setdefault("step", 0)
    config = _config(notes.pop("shape", None), state, path)
    return SavedClassifier(config, state, notes, path)


def read_notes(path: str | Path) -> dict[str, Any]:
    """What a .safetensors file of ours says of its classifier, in plain values. UserError: it is none."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"there is no weights file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {' '.join(str(error).split())}.") from error
    notes = parse_json(found, f"what {path} says of its classifier") if found else None
    return _checked(notes, f"{path} does not say which classifier it holds: mode=export writes files that do.")


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
    return notes, {name: tensor.float() for name, tensor in read_tensors(path).items()}


def _checked(notes: Any, otherwise: str) -> dict[str, Any]:
    """The notes, where they are those of a classifier: names for settings, and counts. UserError for anything else.

    Some become words of a command (see settings_for_weights): a value must be a mere name or number.
    """
    if not isinstance(notes, dict) or notes.get("task") != TASK:
        raise UserError(otherwise)
    shape, sequence = notes.get("shape"), notes.get("sequence", {})
    if not isinstance(shape, dict) or not isinstance(sequence, dict):
        raise UserError(otherwise)
    kept = {name: value for name, value in notes.items() if name not in ("shape", "sequence")}
    for name, value in (*kept.items(), *sequence.items()):
        counts = name in ("stage", "step") or name in sequence
        if not re.fullmatch(r"\w{1,40}", str(name)) or not (_is_count(value) if counts else _is_plain(value)):
            raise UserError(f"{otherwise.split(' ')[0]} is damaged: its {str(name)[:40]} is {shown(value)}.")
    return dict(notes)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_plain(value: Any) -> bool:
    """Nothing, a count, or a name that no setting takes for more than itself."""
    return value is None or _is_count(value) or (type(value) is str and bool(re.fullmatch(r"[\w.-]{1,200}", value)))


def _config(shape: Any, state: dict[str, Tensor], path: Path) -> ClassifierConfig:
    known = {field.name for field in fields(ClassifierConfig)}
    if not isinstance(shape, dict) or not {"classes", "length"} <= shape.keys() <= known:
        raise UserError(f"{path} does not say the shape of its classifier, or one that this version does not know.")
    config = described_config(ClassifierConfig, shape, state, str(path))
    blocks = -(-config.length // max(config.pattern_block, 1))
    if config.pattern != DENSE and blocks > MOST_BLOCKS:
        raise UserError(f"{path}: {blocks:,} blocks of attention. Possible: up to {MOST_BLOCKS:,}.")
    # A pattern has no weights, and its lists would be made.
    check_weights(lambda: Classifier(replace(config, pattern=DENSE), attention="sdpa"), state, str(path))
    return config
