"""A step's loss, its gradients and a validation are means over labels, whatever
computes how many of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contract_runs import DECODER, Settings, logged, train
from forked_commands import run

DDP, FSDP, CONTEXT = (
    {"trainer.devices": 2, "trainer.strategy": name} for name in ("ddp", "fsdp", "context_parallel")
)


@pytest.fixture
def masked(tmp_path: Path) -> Settings:
    """Text of short documents, with rows of ends alone, of which no token is a label."""
    random, end = np.random.default_rng(0), [256]
    for name, count in (("train", 30), ("held-out", 12)):
        parts = [
            np.concatenate([random.integers(0, 256, size), end])
            for size in random.integers(3, 60, count)
        ]
        np.save(tmp_path / f"{name}.npy", np.concatenate([*parts, end * 200]).astype(np.uint16))
    data = {
        "data": "tokens",
        "data.path": tmp_path / "train.npy",
        "data.validation_path": tmp_path / "held-out.npy",
    }
    text = {**data, "data.document_mask": True, "context": 32, "trainer.tokens_per_step": 256}
    return {**DECODER, **text, "model.dropout": 0.0, "trainer.steps": 3}


def measured(folder: Path) -> dict[str, list[float]]:
    rows = logged(folder).values()
    names = ("train_loss", "gradient_norm", "validation_loss")
    return {name: [row[name] for row in rows if name in row] for name in names}


def test_micro_batches_change_nothing(masked: Settings, tmp_path: Path) -> None:
    # Automodel#3796, Lightning#19987: a micro-batch of few labels, or of none, had the
    # weight of one of many.
    whole, parts = (
        measured(train(masked, tmp_path / str(n), **{"trainer.micro_batch": n})) for n in (8, 1)
    )
    for name, values in whole.items():
        assert parts[name] == pytest.approx(values, rel=1e-4), name


@pytest.mark.integration  # processes
@pytest.mark.parametrize(
    "shared", [DDP, FSDP, CONTEXT], ids=lambda shared: shared["trainer.strategy"]
)
def test_devices_change_nothing(masked: Settings, tmp_path: Path, shared: Settings) -> None:
    one = measured(train(masked, tmp_path / "one"))
    run(
        {**masked, **shared, "trainer.micro_batch": 2, "hydra.run.dir": tmp_path / "two"},
        tmp_path / "printed",
        2,
    )
    for name, values in measured(tmp_path / "two").items():
        assert values == pytest.approx(one[name], rel=1e-4), name
