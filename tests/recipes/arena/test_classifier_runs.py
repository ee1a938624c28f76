"""A run of task=classification: stages, checkpoints, resuming in pieces, the learning curve,
evaluating, exporting."""

from __future__ import annotations

import json
import os
import shutil
import signal
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from tiny_runs import TinyRuns

import flashtrain
from flashtrain import registry
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.command.modes import run_mode
from flashtrain.errors import UserError
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.arena.weights import (
    SavedClassifier,
    read_classifier,
    read_notes,
    write_classifier,
)

pytestmark = pytest.mark.integration  # whole runs

LISTOPS = (
    "recipe=lra-listops", "hardware=cpu", "hardware.demo=never", "logger=csv",
    "classifier.embed=16",
    "classifier.layers=1", "classifier.heads=1", "sequence.length=32", "sequence.train=40",
    "sequence.validation=8",
    "sequence.test=8", "sequence.batch=4", "trainer.steps=2", "trainer.validate_every=2",
    "schedule.warmup_steps=1",
)  # fmt: skip


class SignalAt(pl.Callback):
    """Sends this process one signal when so many optimizer steps of all stages are done."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def on_train_batch_end(self, trainer, *_) -> None:
        self.seen += (
            trainer.fit_loop.epoch_loop.batch_progress.current.ready
            % trainer.accumulate_grad_batches
            == 0
        )
        if self.seen == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class FirstImages(pl.Callback):
    """Keeps the pixels of the first micro-batch of every stage."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 0 and batch_idx == 0:
            self.seen.append(batch["tokens"].clone())


def weights(folder, name="last.ckpt"):
    return read_checkpoint(folder / "checkpoints" / name)["state_dict"]


def same_weights(one, other) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(weights(one).values(), weights(other).values(), strict=True)
    )


def curve(folder) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "learning_curve.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "minutes"} for row in rows]


def summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_both_stages_are_trained_and_the_curve_reports_of_all(finished) -> None:
    rows = curve(finished)
    assert [(row["stage"], row["side"], row["step"], row["images"]) for row in rows] == [
        (1, 24, 3, 12), (1, 24, 5, 20), (2, 28, 3, 32), (2, 28, 4, 36),
    ]  # fmt: skip
    assert (finished / "stage-1-side-24" / "metrics.jsonl").is_file()
    assert (finished / "stage-2-side-28" / "metrics.jsonl").is_file()
    row = summary(finished)
    assert (row["status"], row["steps"], row["samples"], row["side"], row["stages"]) == (
        "finished",
        9,
        36,
        28,
        2,
    )
    assert not any(isinstance(value, dict | list) for value in row.values())
    assert row["validation_accuracy"] == pytest.approx(rows[-1]["validation_accuracy"], abs=1e-5)


def test_stages_of_the_same_images_begin_with_others_of_them(
    curriculum: TinyRuns, monkeypatch
) -> None:
    first = FirstImages()
    monkeypatch.setitem(registry._components["callback"], "first", lambda _: first)
    stages = (
        "curriculum.stages=[{side:24,steps:1,batch:4},{side:24,steps:1,batch:4},"
        "{side:24,steps:1,batch:4}]"
    )
    status, _ = curriculum.run(
        "orders", stages, "trainer.callbacks=[first]", "sequence.augment=none"
    )
    assert status == 0
    one, two, three = first.seen
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)


def test_a_carried_checkpoint_goes_on_in_a_new_folder_with_its_whole_curve(
    curriculum: TinyRuns, finished, monkeypatch, tmp_path
) -> None:
    stop = SignalAt(4)  # acted upon at the end of the next step, the last one of the first stage
    monkeypatch.setitem(registry._components["callback"], "stop", lambda _: stop)
    status, folder = curriculum.run("carried-from", "trainer.callbacks=[stop]")
    assert (status, summary(folder)["status"]) == (143, "stopped")
    carried = shutil.copy(folder / "checkpoints" / "last.ckpt", tmp_path / "carried.ckpt")
    status, folder = curriculum.run("carried-to", f"resume={carried}")
    assert status == 0
    assert curve(folder) == curve(finished)
    assert same_weights(finished, folder)


def test_a_finished_stage_leads_to_the_next(curriculum: TinyRuns, finished) -> None:
    first = "curriculum.stages=[{side:24,steps:5,batch:4,learning_rate:0.003}]"
    status, folder = curriculum.run("longer", first)
    assert status == 0
    status, folder = curriculum.run("longer", f"resume={folder}")
    assert status == 0
    assert same_weights(finished, folder)
    assert curve(folder) == curve(finished)


def test_tokens_are_pre_trained_on_and_their_weights_start_a_training(tmp_path, caplog) -> None:
    runs = TinyRuns(tmp_path, [*LISTOPS])
    with caplog.at_level("INFO", logger="flashtrain"):
        status, before = runs.run(
            "before", "sequence.classification_weight=0", "masked_pixels.weight=1"
        )
    assert status == 0
    assert "of what is masked, held out" in caplog.text
    status, folder = runs.run("after", f"weights={before}")
    assert status == 0
    assert weights(before).keys() - weights(folder).keys() == {
        "model.mask_embedding",
        "model.pixel_head.weight",
    }


def test_exported_weights_are_tested_on_the_task_that_they_were_trained_on(tmp_path) -> None:
    runs = TinyRuns(tmp_path, [*LISTOPS])
    status, folder = runs.run("tokens", "sequence.seed=3")
    assert status == 0
    run_mode(settings_from_checkpoint(["mode=export", f"checkpoint={folder}"]))
    (file,) = folder.glob("export*/classifier.safetensors")
    found = settings_from_checkpoint(
        ["mode=evaluate", f"weights={file}", "sequence.test=5"]
    ).sequence
    assert (found.data, found.length, found.seed, found.train, found.validation, found.test) == (
        "listops", 32, 3, 40, 8, 5,
    )  # fmt: skip


def test_a_classifier_is_loaded_in_python(finished) -> None:
    loaded = flashtrain.load(finished)
    best = read_checkpoint(finished / "checkpoints" / "best.ckpt")["state_dict"]
    assert all(
        torch.equal(value, best[f"model.{name}"])
        for name, value in loaded.model.state_dict().items()
    )
    assert (loaded.tokenizer, loaded.settings.task) == (None, "classification")


def test_training_starts_from_exported_weights(curriculum: TinyRuns, finished) -> None:
    run_mode(settings_from_checkpoint(["mode=export", f"checkpoint={finished}"]))
    (file,) = finished.glob("export*/classifier.safetensors")
    words = ("curriculum.stages=[{side:32,steps:1,batch:4,learning_rate:1e-12}]", f"weights={file}")
    status, folder = curriculum.run("from-weights", *words)
    assert status == 0
    best = read_checkpoint(finished / "checkpoints" / "best.ckpt")["state_dict"]
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, best[name], atol=1e-8, rtol=0)


def test_a_run_and_its_exported_weights_have_one_accuracy_on_fresh_images(
    curriculum: TinyRuns, finished, tmp_path, caplog
) -> None:
    cache = next(word for word in curriculum.words if word.startswith("pathfinder.cache_dir"))
    run_mode(
        settings_from_checkpoint(["mode=evaluate", f"checkpoint={finished}", "pathfinder.seed=5"])
    )
    run_mode(
        settings_from_checkpoint(
            ["mode=export", f"checkpoint={finished}", "export_precision=float16"]
        )
    )
    file = max(
        finished.glob("export*/classifier.safetensors"), key=lambda path: path.stat().st_mtime
    )
    assert read_notes(file)["recipe"] == "pathx"
    words = [
        "mode=evaluate",
        f"weights={file}",
        "pathfinder.seed=5",
        "pathfinder.test_images=40",
        "hardware=cpu",
    ]
    run_mode(settings_from_checkpoint([*words, f"output={tmp_path}", cache]))
    found = [json.loads(path.read_text())["rows"][0] for path in (
        next(finished.glob("evaluate*/result.json")),
        next(tmp_path.glob("pathx/evaluate*/result.json"))
    )]  # fmt: skip
    assert found[0]["accuracy"] == pytest.approx(found[1]["accuracy"], abs=0.03)
    assert (found[0]["samples"], found[0]["seed"], found[0]["side"], found[0]["contour"]) == (
        40,
        5,
        28,
        "easy",
    )
    assert found[0]["accuracy_low"] < found[0]["accuracy"] < found[0]["accuracy_high"]


def test_what_weights_say_becomes_values_of_few_settings(tmp_path) -> None:
    config = ClassifierConfig(
        classes=10, length=32, embed=8, layers=1, heads=1, ffn=8, positions="rotary"
    )
    state = Classifier(config, attention="sdpa").state_dict()
    notes = {
        "recipe": "lra-listops",
        "data": "listops",
        "sequence": {"seed": 3, "path": str(tmp_path)},
    }
    file = write_classifier(
        SavedClassifier(config, state, notes, tmp_path), tmp_path / "own.safetensors"
    )
    found = settings_from_checkpoint(["mode=evaluate", f"weights={file}"]).sequence
    assert (found.data, found.seed, found.length) == ("listops", 3, 32)
    assert found.path is None
    other = SavedClassifier(config, state, {**notes, "contour": "${oc.env:HOME}"}, tmp_path)
    with pytest.raises(UserError, match=r"contour '\$\{oc.env:HOME\}'"):
        settings_from_checkpoint(
            ["mode=evaluate", f"weights={write_classifier(other, tmp_path / 'o.safetensors')}"]
        )


def test_weights_that_are_no_classifier_are_refused(tmp_path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="holds no classifier"):
        read_classifier(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("trainer.devices=3",), "devices"),
        (("curriculum.stages=[{side:24,learning_rate:0}]",), "learning_rate"),
        (("curriculum.stages=[{sides:24}]",), "sides"),
        (("curriculum.stages=[{side:24,stop_at_accuracy:90}]",), "stop_at_accuracy"),
        (
            (
                "curriculum.stages=[{side:24,stop_at_accuracy:0.9}]",
                "sequence.classification_weight=0",
            ),
            "stop_at_accuracy",
        ),
        (("curriculum.stages=[{side:24,contour:7..3}]",), "contour '7-3'"),
        (("curriculum.stages=[{side:24,schedule:cosin}]",), "cosine"),
        (("sequence.data=listops",), "sequence.data=listops"),
        (("sequence.data=poems",), "sequence.data"),
        (("sequence.data=listops", "sequence.augment=turn", "curriculum.stages=[]"), "augment"),
        (("classifier.inputs=grays",), r"classifier\.inputs"),
        (("classifier.pooling=min",), r"classifier\.pooling"),
        (
            ("sequence.data=listops", "classifier.inputs=grey", "curriculum.stages=[]"),
            r"classifier\.inputs=grey",
        ),
        (("sequence.length=64",), "pathfinder.side"),
        (("sequence.train=9",), "pathfinder.train_images"),
        (("sequence.data=text", "sequence.test=9", "curriculum.stages=[]"), "sequence.test"),
        (("masked_pixels.share=0",), "masked_pixels.share"),
        (("sequence.training_pixels=400",), "training_pixels=400"),
        (
            ("sequence.data=listops", "sequence.training_pixels=9", "curriculum.stages=[]"),
            "training_pixels",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(curriculum: TinyRuns, words, named) -> None:
    with pytest.raises(UserError, match=named):
        stages_of(compose_settings(curriculum.settings_words(*words)))
