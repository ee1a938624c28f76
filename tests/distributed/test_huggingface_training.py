"""Trainings of transformers models under ContextParallelStrategy have one
process's curves, in float64."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_ranks import MODELS, model_of
from huggingface_training import (
    STEPS,
    OfTransformers,
    adapters,
    language_model,
    row,
    script,
    sinks,
    strategy,
)
from ranks import of_ranks
from strategy_ranks import trainer
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

ALONE: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "adapters": ("two", adapters),
    "masked": ("two", partial(language_model, masked=True)),
    "unmasked": ("two", partial(language_model, masked=False)),
    "sinks": ("four", partial(sinks, batch=2)),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks compute: see quiet_and_exact."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def same_curve(folder: Path, name: str, expected: dict[str, Any]) -> None:
    found = [rank[name] for rank in of_ranks(folder, 4 if folder.name == "four" else 2)]
    assert len(expected["losses"]) == STEPS
    np.testing.assert_allclose(
        np.mean([rank["losses"] for rank in found], 0), expected["losses"], rtol=1e-10
    )
    # A mean that a step logs is that over the labels of all ranks; Lightning keeps some in float32.
    assert [rank["logged"] for rank in found] == [
        pytest.approx(expected["logged"], rel=1e-6)
    ] * len(found)


@pytest.mark.integration
@pytest.mark.parametrize("name", ALONE)
def test_twenty_steps_are_one_process(
    huggingface_training: Path, tmp_path: Path, name: str
) -> None:
    if name == "adapters":
        pytest.importorskip("peft")
    ranks, train = ALONE[name]
    same_curve(huggingface_training / ranks, name, train(tmp_path))


@pytest.mark.integration
def test_the_script_of_the_guide_trains_as_one_process_does(
    huggingface_training: Path, tmp_path: Path
) -> None:
    expected = script(tmp_path, huggingface_training, devices=1, strategy="auto")
    same_curve(huggingface_training / "two", "script", expected)


@pytest.mark.parametrize("model", MODELS)
def test_each_decoder_layer_is_sharded_by_itself(tmp_path: Path, model: str) -> None:
    task = OfTransformers(copy.deepcopy(model_of(model, 4)))
    try:
        fit = trainer(tmp_path, max_steps=1, devices=1, strategy=strategy(1))
        fit.fit(task, DataLoader([row(0)]))
    finally:
        torch.distributed.destroy_process_group()
    sharded = [
        name for name, module in task.model.named_modules() if isinstance(module, FSDPModule)
    ]
    layers = "transformer.h" if model == "gpt2" else "model.layers"
    assert sharded == ["", f"{layers}.0", f"{layers}.1"]
