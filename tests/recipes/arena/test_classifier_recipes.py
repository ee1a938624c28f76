"""Every recipe of task=classification trains or measures a step on this machine, by its demo."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import run_job
from tiny_runs import each

from flashtrain.command.compose import compose_settings
from flashtrain.data.sequences import SequenceShape
from flashtrain.files.shipped import recipe_files
from flashtrain.models.classifier import Classifier
from flashtrain_recipes.arena.build import classifier_config

IMAGES = ("pathfinder.train_images=8", "pathfinder.validation_images=4")
FEW = tuple(f"sequence.{part}=8" for part in ("train", "validation", "test"))
SMALLEST = {
    "pathx": ("curriculum.stages=[{side:24,steps:1,batch:2}]", *IMAGES),
    "path256": ("curriculum.stages=[{side:32,steps:1,batch:2}]", "trainer.micro_batch=1", *IMAGES),
    "path512": ("curriculum.stages=[{side:32,steps:1,batch:2}]", "trainer.micro_batch=1", *IMAGES),
    "lra-pathfinder": ("curriculum.stages=[{side:24,steps:1,batch:2}]", *IMAGES),
    "lra-listops": ("trainer.steps=1", "sequence.length=64", "sequence.batch=2", *FEW),
    "lra-text": ("trainer.steps=1", "sequence.validation=2", "sequence.batch=2"),
    "lra-retrieval": ("trainer.steps=1", "sequence.batch=2"),
    "lra-image": ("trainer.steps=1", "sequence.validation=2", "sequence.batch=2"),
    "lra-speed": (
        "benchmark.rounds=1",
        "benchmark.steps=1",
        "benchmark.longest=64",
        "benchmark.batches=[1]",
    ),
}


def local_data(recipe: str, folder: Path) -> list[str]:
    """The words for a few samples of the tasks that are read from disk, written to the folder."""
    if recipe == "lra-text":
        for part in ("train", "test"):
            rows = [{"text": f"a film {number}", "label": number % 2} for number in range(8)]
            (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    elif recipe == "lra-retrieval":
        for part in ("train", "eval", "test"):
            (folder / f"{part}.tsv").write_text(
                "1\ta\tb\tone text\tanother\n0\ta\tc\tone text\tnone\n" * 4
            )
    elif recipe == "lra-image":
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            (folder / f"{name}.bin").write_bytes(
                np.arange(4 * 3073, dtype=np.int64).astype(np.uint8).tobytes()
            )
        for name in folder.glob("*.bin"):  # labels are below ten
            rows = np.frombuffer(name.read_bytes(), dtype=np.uint8).reshape(4, 3073).copy()
            rows[:, 0] %= 10
            name.write_bytes(rows.tobytes())
    else:
        return []
    return [f"sequence.path={folder}"]


def test_the_papers_model_of_images_can_be_named() -> None:
    """FlashAttention's Table 3 has the hyperparameters of Nystromformer's code: two layers of 64,
    feed-forward layers of 128, learned positions, grey levels as tokens."""
    words = "embed=64 layers=2 heads=2 ffn=128 positions=learned inputs=tokens pooling=mean"
    settings = compose_settings(
        ["recipe=lra-image", *(f"classifier.{word}" for word in words.split())]
    )
    shape = SequenceShape(classes=10, length=1024, side=32)
    model = Classifier(classifier_config(settings.classifier, shape))
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 128 + 128 + 64 + 4 * 64
    head = 64 * 64 + 64 + 64 * 10 + 10
    own = model.mask_embedding.numel() + model.pixel_head.weight.numel()
    assert model.parameter_count() - own == (256 + 1024) * 64 + 2 * layer + 2 * 64 + head


def test_every_such_recipe_is_tried() -> None:
    named = {name for name in recipe_files() if name.startswith(("lra-", "path"))}
    assert named - {"pathfinder-preview"} == set(SMALLEST)


@pytest.mark.parametrize("recipe", each(SMALLEST, "lra-listops"))
def test_it_trains_or_measures_a_step_on_a_cpu(recipe: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    words = [
        f"recipe={recipe}",
        "hardware=cpu",
        "logger=none",
        *SMALLEST[recipe],
        *local_data(recipe, tmp_path),
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    status = run_job(compose_settings(words), folder, overrides=words, started=time.monotonic())
    row = json.loads((folder / "summary.json").read_text())
    assert (status, row["status"]) == (0, "finished"), row
    if recipe == "lra-speed":
        rows = json.loads((folder / "result.json").read_text())["rows"]
        assert {row["task"] for row in rows} >= {
            "listops",
            "text",
            "retrieval",
            "image",
            "pathfinder",
            "pathx",
        }
        assert all(
            row["samples_per_second"] > 0 and row["speedup_over_standard"] > 0 for row in rows
        )
