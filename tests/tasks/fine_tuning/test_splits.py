"""Which texts of a folder or file are trained on, which validate and which test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashtrain.command.modes import plan
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.data import DataSettings
from flashtrain.tasks.fine_tuning.settings import FineTuningSettings, LabelledSettings
from flashtrain.tasks.fine_tuning.splits import LabelledSource, make_source


def write(path: Path, labels: str, count: int = 10) -> None:
    path.write_text(
        "\n".join(
            json.dumps({"text": f"{path.name} {n}", "labels": labels[n % 2]}) for n in range(count)
        )
    )


def test_a_plan_counts_the_texts_that_are_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "ab", 40)
    own = ["finetune.data=files", f"finetune.path={tmp_path}", "finetune.target=class"]
    words = ["recipe=bert-finetune", *own, "finetune.batch=8", "trainer.steps=9", "mode=plan"]
    settings = settings_of([*words, "hardware.plan_for=h100"])
    line = f"texts: 72 are read in 2.0 epochs of 36 of {tmp_path.name}, cut to"
    assert line in plan(settings, CommandLine())


def test_a_plan_counts_no_backward_of_a_frozen_encoder() -> None:
    words = "recipe=bert-finetune", "mode=plan", "hardware.plan_for=h100"
    whole, frozen = (
        plan(settings_of([*words, f"finetune.frozen={word}"]), CommandLine())
        for word in ("false", "true")
    )
    assert getattr(frozen, "seconds", 0) == pytest.approx(getattr(whole, "seconds", 1) / 3)


def source_of(path: Path, **options) -> LabelledSource:
    own = FineTuningSettings(data="files", path=str(path), target="class")
    return make_source(
        LabelledSettings(data=DataSettings(tokenizer="bytes"), context=16, finetune=own), **options
    )


def counts(source: LabelledSource) -> dict[str, int]:
    return {name: len(samples) for name, samples in source.samples.items()}


NAMED = {"train-1": 4, "train-2": 4, "more": 2, "validation": 3, "test": 2}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (NAMED, {"train": 10, "validation": 3, "test": 2}),
        ({"data": 20, "test": 5}, {"train": 18, "validation": 2, "test": 5}),
    ],
)
def test_files_are_the_parts_that_they_are_named_for(tmp_path, files, expected) -> None:
    for name, count in files.items():
        write(tmp_path / f"{name}.jsonl", "xy", count)
    assert counts(source_of(tmp_path)) == expected


def test_a_file_alone_is_divided(tmp_path) -> None:
    write(tmp_path / "test.jsonl", "xy", 20)
    assert counts(source_of(tmp_path / "test.jsonl")) == {"train": 18, "validation": 2}


def test_a_label_that_only_a_held_out_text_has_is_known(tmp_path) -> None:
    rows = [{"text": str(n), "labels": f"rare {n}" if n < 10 else "xy"[n % 2]} for n in range(40)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(source_of(tmp_path).label_names) == 12


def test_texts_to_score_alone_are_those_called_test_or_all(tmp_path) -> None:
    write(tmp_path / "data.jsonl", "xy", 20)
    trained = {
        "label_names": ["x", "y"],
        "only_test": True,
        "tokenizer": source_of(tmp_path).tokenizer,
    }
    assert counts(source_of(tmp_path, **trained)) == {"test": 20}
    write(tmp_path / "test.jsonl", "xy", 5)
    assert counts(source_of(tmp_path, **trained)) == {"test": 5}


def test_what_cannot_be_trained_on_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="no labelled texts at"):
        source_of(tmp_path)
    write(tmp_path / "test.jsonl", "xy")
    with pytest.raises(UserError, match=r"no labelled texts to train on at .*, only test"):
        source_of(tmp_path)
    write(tmp_path / "train.jsonl", "xx")
    with pytest.raises(UserError, match=r"finetune\.target=class"):
        source_of(tmp_path)
    write(tmp_path / "train.jsonl", "xz")
    with pytest.raises(UserError, match=r"test.jsonl:2 has the label 'y': expected x, z"):
        source_of(tmp_path)
