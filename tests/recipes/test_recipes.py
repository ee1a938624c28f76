"""Every recipe composes, says what it is, and trains or measures a step on this machine."""

from __future__ import annotations

import json

import pytest
from tiny_runs import flashtrain_command

from flashtrain.compose import apply_demo, compose_settings
from flashtrain.locate import recipe_description, recipe_files

RECIPES = sorted(recipe_files())
# Trained in this process by tests/classification/test_classifier_recipes.py: a start of Python each would take long.
CLASSIFIERS = [name for name in RECIPES if name.startswith(("lra-", "path")) and name != "pathfinder-preview"]
# Likewise, by tests/masked_text/test_bert_recipes.py.
BERTS = ["bert", "bert-lamb", "bert-speed", "finetune", "long-document"]
# What keeps a recipe that does more than one thing to its smallest.
SMALLEST = {"gpt2-long": ("lengths.contexts=[64]", "lengths.windows=2")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_composes_and_so_does_its_demo(recipe: str) -> None:
    settings = compose_settings([f"recipe={recipe}"])
    assert apply_demo(settings, []).is_demo


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_first_line_says_what_it_does(recipe: str) -> None:
    assert len(recipe_description(recipe_files()[recipe])) > 10


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in CLASSIFIERS + BERTS])
def test_it_trains_or_measures_a_step_on_a_cpu(recipe: str, tmp_path) -> None:
    words = ["hardware=cpu", "logger=none"]
    if compose_settings([f"recipe={recipe}"]).benchmark.name is None:
        words += ["trainer.steps=1", "trainer.tokens_per_step=512", "generate.tokens=4"]
    else:
        words += ["benchmark.rounds=1", "benchmark.steps=1", "benchmark.contexts=[32,64]", "benchmark.max_seconds=20"]
    done = flashtrain_command(f"recipe={recipe}", *words, *SMALLEST.get(recipe, ()), f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = tmp_path.glob(f"{recipe}/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"


@pytest.mark.parametrize("recipe", ["gpt2-speed", "context-speed"])
def test_what_is_measured_is_what_the_gpt2_recipe_trains(recipe: str) -> None:
    measured, trained = (compose_settings([f"recipe={name}"]) for name in (recipe, "gpt2"))
    for group in ("model", "data", "attention", "optimizer", "schedule", "trainer", "hardware"):
        assert getattr(measured, group) == getattr(trained, group)
