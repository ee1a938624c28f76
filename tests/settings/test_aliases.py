"""Older names of settings and older values are answered with ours; saved configurations
that have them are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CONFIG_FILE, read_settings
from flashtrain.settings.aliases import REMOVED, RENAMED, others, updated
from flashtrain.settings.schema import all_settings
from flashtrain_recipes.arena.settings import StageSettings

SETTINGS = {name: one for name, one, _ in all_settings()}


def test_the_names_that_are_answered_are_no_settings_and_their_answers_are() -> None:
    ours = [one.partition("=")[0] for one in RENAMED.values()]
    ours += [
        setting
        for answer in others()
        for setting in re.findall(r"(?:^|[ +])([a-z_.]+)=|^([a-z_.]+)", answer)
    ]
    assert {name for name in map("".join, ours) if name} <= {
        *SETTINGS,
        *StageSettings.__dataclass_fields__,
    }
    names = [name for names in others().values() for name in names.split()]
    assert {*names, *RENAMED} & {*SETTINGS} == {"memory"}
    assert not {*names} & {leaf for leaf in SETTINGS if "." not in leaf}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "recipe=gpt2 trainer.context_way=ring",
            "trainer.context_way=ring: use trainer.context_parallel_method=ring.",
        ),
        ("recipe=gpt2 memory=full", "memory=full: use memory.activation_checkpointing=full."),
        ("recipe=gpt2 model=modern", "model=modern: use model=llama."),
        ("recipe=gpt2 model.name=modern", "model.name=modern: use model.name=llama."),
        ("recipe=finetune", "recipe=finetune: use recipe=bert-finetune."),
        (
            "recipe=finetune finetune.data=cues finetune.bach=2",
            "use finetune.data=synthetic. unknown setting",
        ),
        (
            "recipe=gpt2 trainer.strategy=context",
            "trainer.strategy=context: use trainer.strategy=context_parallel.",
        ),
        ("recipe=pathx curriculum.stages=[{side:24,until:0.9}]", "until: use stop_at_accuracy."),
        (
            "recipe=long-context-benchmark benchmark.layouts=[head-tail]",
            "head-tail: use benchmark.layouts=zigzag.",
        ),
    ],
)
def test_a_word_of_earlier_is_answered_with_ours(words: str, answer: str) -> None:
    with pytest.raises(UserError) as mistake:
        compose_settings(words.split())
    assert answer in str(mistake.value)


@pytest.mark.parametrize(
    ("recipe", "answer"),
    [
        ("trainer: {strategy: context}", "trainer.strategy=context_parallel"),
        ("generate: {tokens: 4}", "generate.tokens: use generate.max_new_tokens"),
        ("defaults: [override /model: modern]", "model=llama"),
        ("defaults: [override /memory: full]", "memory: use memory.activation_checkpointing"),
    ],
)
def test_a_recipe_of_earlier_is_answered_with_ours(
    recipe: str, answer: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "mine.yaml").write_text(f"# Mine\n{recipe}\n")
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    with pytest.raises(UserError, match=answer):
        compose_settings(["recipe=mine"])


def test_the_saved_configuration_of_an_older_run_is_read(tmp_path: Path) -> None:
    older = {
        "recipe": "finetune",
        "memory": {"checkpointing": "full"},
        "model": {"name": "modern"},
        "generate": {"tokens": 7},
        "trainer": {
            "context_way": "all-to-all", "context_layout": "head-tail", "checkpoint": "file",
            "strategy": "context",
        },
        "demo": {"generate.tokens": 4},
    }  # fmt: skip
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(older))
    made = read_settings(tmp_path)
    assert (made.recipe, made.memory.activation_checkpointing, made.model.name) == (
        "bert-finetune",
        "full",
        "llama",
    )
    assert (made.generate.max_new_tokens, made.demo) == (7, {"generate.max_new_tokens": 4})
    trainer = made.trainer
    assert (trainer.context_parallel_method, trainer.context_parallel_layout) == (
        "ulysses",
        "zigzag",
    )
    assert (trainer.checkpoint_format, trainer.strategy) == ("file", "context_parallel")
    stages = {"curriculum": {"stages": [{"side": 24, "until": 0.9}]}}
    assert updated(stages) == {"curriculum": {"stages": [{"side": 24, "stop_at_accuracy": 0.9}]}}


def test_a_run_that_has_settings_which_are_gone_is_read_where_they_asked_for_what_is_done_now(
    tmp_path: Path,
) -> None:
    assert not REMOVED.keys() & SETTINGS.keys()
    lengths = {
        "recipe": "gpt2-long",
        "lengths": {"contexts": [64], "bins": 4},
        "passkey": {"digits": 7, "lengths": [64], "trials": 3},
    }
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(lengths))
    assert read_settings(tmp_path).lengths.contexts == [64]
    masked = {
        "recipe": "bert",
        "task": "masked_language_model",
        "masked": {"shortest": 16, "layout": "padded"},
    }
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(masked))
    assert read_settings(tmp_path).masked.layout == "padded"
    masked["masked"]["shortest"] = 3  # other texts than ours would be
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(masked))
    with pytest.raises(UserError, match="shortest"):
        read_settings(tmp_path)


def test_a_stage_that_left_a_setting_out_which_is_gone_is_read() -> None:
    stage = {"side": 24, "classification_weight": None}
    assert updated({"curriculum": {"stages": [stage]}}) == {
        "curriculum": {"stages": [{"side": 24}]}
    }
    stage["classification_weight"] = 0
    # And is refused.
    assert updated({"curriculum": {"stages": [stage]}}) == {"curriculum": {"stages": [stage]}}
