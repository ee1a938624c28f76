"""A model as a file describes it: believed only as far as the file's own tensors bear it out.

A checkpoint, an export and a config.json say how many layers of which width to build. All of that is checked by
arithmetic, before any memory is taken: each field's type, the number of layers against the number of tensors, and the
shape of every tensor against those of the same model without storage (torch's meta device).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, unknown
from flashtrain.integrations.safetensors_files import check_tensors, shown

Config = TypeVar("Config")

LARGEST = 2**31 - 1  # of any size: tokens, rows, widths


def described_config(config_class: type[Config], given: Any, tensors: Mapping[str, Tensor], where: str) -> Config:
    """The configuration (a dataclass) that a file describes by plain values, for a model with these tensors.

    where: the file and the part of it that describes the model, for messages.
    UserError: a field that is unknown, missing, of another type, not finite or too large; more layers than tensors;
    sizes that cannot work together.
    """
    if not isinstance(given, dict):
        raise UserError(f"{where} does not describe a model: it is {shown(given)}.")
    known = {field.name: field for field in fields(config_class)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown(f"entry of {where}", str(name), known)
    types_of = get_type_hints(config_class)
    for name, field in known.items():
        if name in given:
            _check_value(given[name], types_of[name], f"{where}: {name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where} does not describe a model: it has no {name}.")
    layers = given.get("layers", 1)
    if layers > len(tensors):
        raise UserError(f"{where}: {layers:,} layers, and the file holds {len(tensors):,} tensors.")
    try:
        return config_class(**given)
    except UserError as error:
        raise UserError(f"{where} describes no model that can be: {error}") from error
    except (ArithmeticError, TypeError, ValueError) as error:  # a power of two huge numbers, say
        raise UserError(f"{where} describes no model that can be: {error}.") from error


def check_vocabulary(tokens: int, known: int, folder: Path) -> None:
    """UserError where a folder's tokenizer makes more tokens than its weights know: one of them would have no row."""
    if tokens > known:
        raise UserError(
            f"{folder}: its tokenizer makes {tokens:,} tokens, and its weights know {known:,}. Possible: the tokenizer "
            "that they were trained with."
        )


def check_weights(make: Callable[[], nn.Module], tensors: Mapping[str, Any], where: str) -> None:
    """UserError unless `tensors` are exactly the parameters of the model that `make` builds, in ordinary memory.

    make: builds it on the meta device, where nothing is stored. where: what the weights are in.
    """
    check_stored(tensors, where)
    check_tensors(tensors, shapes_of(make, where), where, "its description")


def shapes_of(make: Callable[[], nn.Module], where: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of the model that `make` builds. UserError: sizes that no tensor can have."""
    try:
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    except UserError as error:
        raise UserError(f"{where} describes no model that can be: {error}") from error
    except (RuntimeError, ArithmeticError, TypeError) as error:  # more bytes than can be counted
        raise UserError(f"{where} describes no model that can be: {' '.join(str(error).split())[:200]}.") from error


def check_stored(tensors: Mapping[str, Any], where: str) -> None:
    """UserError unless these are dense numbers that the file holds: a view of a single one can have any size."""
    stored: dict[int, int] = {}
    spread = 0
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
        if not plain or tensor.device.type != "cpu" or not tensor.is_floating_point():
            raise UserError(f"{where}: '{name}' is no weight: {shown(tensor)}.")
        storage = tensor.untyped_storage()
        stored[storage._cdata] = storage.nbytes()
        spread += tensor.nbytes
    if spread > 2 * sum(stored.values()):  # tied weights are stored once and named twice
        raise UserError(
            f"{where}: its tensors would take {spread:,} bytes, and the file holds {sum(stored.values()):,} of them."
        )


def trained_steps(saved: Mapping[str, Any], where: str | Path) -> int:
    """The optimiser steps that a checkpoint was trained for; 0 where it does not say. UserError: no count."""
    steps = saved.get("global_step", 0)
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise UserError(f"{where} is damaged: its global_step is {shown(steps)}. Possible: a count of steps.")
    return steps


def _check_value(value: Any, kind: Any, what: str) -> None:
    """UserError unless a value is of a dataclass field's type: bool, int, float, str, or one of these or None."""
    possible = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in possible:
        return
    if float in possible and type(value) in (int, float):
        if abs(value) <= LARGEST * LARGEST:  # neither NaN nor infinity is
            return
    elif type(value) in possible and (type(value) is not int or abs(value) <= LARGEST):
        return
    words = {int: f"a whole number up to {LARGEST:,}", float: "a finite number", str: "text", bool: "true or false"}
    raise UserError(f"{what} is {shown(value)}. Possible: {' or '.join(words.get(one, 'none') for one in possible)}.")
