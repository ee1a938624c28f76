"""A setting that a command line names changes something, or is refused in a line that says who heeds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published_commands import ROOT, asked_alike, jobs_of, published_commands, saved_runs, words_of

from flashtrain.command import modes, sweep
from flashtrain.command.compose import check_given_once, compose_settings
from flashtrain.command.given import check_all_heeded, check_heeded_by_a_job, rules
from flashtrain.command.words import plain_words
from flashtrain.errors import UserError
from flashtrain.files.shipped import recipe_files
from flashtrain.settings.settings import Settings, setting_names


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_runs(tmp_path_factory.mktemp("runs"))


def check(words: list[str]) -> Settings:
    """The settings of a command line, after all that is asked of them before anything runs."""
    words = plain_words(words)
    check_given_once(words)
    settings = modes.settings_from_checkpoint(words) or compose_settings(words)
    check_all_heeded(settings, words)
    return settings


def refused(words: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        check(words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["recipe=gpt2", "recipe=bert"], "recipe is given twice, as recipe=gpt2 and as recipe=bert"),
        (["recipe=gpt2", "recipe=gpt2"], "recipe is given twice"),
        (["recipe=gpt2", "context=1", "context=2"], "context is given twice"),
        (["recipe=gpt2", "trainer.steps=1", "++trainer.steps=2"], r"trainer.steps is given twice, as .* \+\+trainer"),
        (["recipe=gpt2", "model=gpt2", "model=modern"], "model is given twice"),
        (["recipe=gpt2", "+model.options.a=1", "model.options.a=2"], "model.options.a is given twice"),
        (["recipe=gpt2", "prompt=a", "~prompt"], "prompt is given twice"),
    ],
)
def test_a_setting_that_is_given_twice_is_refused(words: list[str], given: str) -> None:
    with pytest.raises(UserError, match=given):
        check_given_once(words)


def test_a_group_and_settings_in_it_are_not_the_same_and_hydras_own_may_come_twice() -> None:
    check_given_once(["recipe=gpt2", "optimizer=lamb", "optimizer.learning_rate=1", "context=1,2"])
    check_given_once(["recipe=gpt2", "hydra.run.dir=a", "hydra.run.dir=b"])


@pytest.mark.parametrize(
    ("words", "who"),
    [
        ("recipe=gpt2 benchmark.contexts=[512]", "mode=benchmark of recipe=gpt2-speed, context-speed"),
        ("recipe=gpt2 benchmark.rows=paper", "recipe=attention-benchmark"),
        ("recipe=gpt2-speed benchmark.seqlens=[512]", "recipe=attention-benchmark, long-context-benchmark"),
        ("recipe=gpt2-speed benchmark.tokens=65536", "benchmark.batches=null"),
        ("recipe=gpt2-speed context=512", "benchmark.contexts"),
        ("recipe=gpt2-speed model.size=355m", r"benchmark.models=\[124m,355m\]"),
        ("recipe=gpt2-speed trainer.steps=3", r"benchmark\.\*"),
        ("recipe=attention-benchmark benchmark.rows=anchors benchmark.heads=4", "benchmark.rows=grid, features"),
        ("recipe=attention-benchmark attention=sdpa", "benchmark.implementations"),
        ("recipe=attention-benchmark weights=x", "what trains"),
        ("recipe=bert-speed bert.size=base", "benchmark.models"),
        ("recipe=lra-speed classifier.layers=2", "trainings of a classifier"),
        ("recipe=gpt2 lengths.contexts=[64]", "mode=lengths"),
        ("recipe=long-document lengths.window=64", "mode=lengths of a language model"),
        ("recipe=lra-listops pathfinder.side=64", "classifiers of sequence.data=pathfinder"),
        ("recipe=gpt2 classifier.layers=2", "trainings of a classifier"),
        ("recipe=gpt2 sequence.batch=2", "classifiers"),
        ("recipe=gpt2 masked_pixels.weight=1", "trainings of a classifier"),
        ("recipe=gpt2 curriculum.stages=[]", "trainings of a classifier"),
        ("recipe=gpt2 bert.size=base", "recipe=bert"),
        ("recipe=gpt2 finetune.batch=2", "recipe=finetune"),
        ("recipe=bert model.size=355m", r"BERT has bert\.\*"),
        ("recipe=pathx model=modern", r"a classifier classifier\.\*"),
        ("recipe=pathx data=files data.path=x", r"a classifier has sequence\.\*"),
        ("recipe=pathx trainer.tokens_per_step=4096", "sequence.batch"),
        ("recipe=pathx context=4096", "sequence.length"),
        ("recipe=bert prompt=x", "mode=generate"),
        ("recipe=finetune data=files data.path=x", "finetune.path"),
        ("recipe=finetune finetune.text_column=x", "finetune.data=files, hub"),
        ("recipe=finetune trainer.cuda_graphs=true", "trainings of language models"),
        ("recipe=gpt2 weights=x model.size=355m", "without weights="),
        ("recipe=finetune weights=x bert.size=base", "without weights="),
        ("recipe=gpt2 checkpoint=x", "mode=evaluate"),
        ("recipe=gpt2 export_precision=float16", "mode=export of a classifier"),
        ("recipe=gpt2 trainer.timeout_seconds=9", "trainer.strategy=context"),
        ("recipe=gpt2 schedule=constant schedule.minimum_ratio=0", "schedule=cosine, linear"),
        ("recipe=gpt2 optimizer.momentum=0.9", "optimizer=muon"),
        ("recipe=gpt2 optimizer.master_weights=false", "hardware.precision=bf16-true"),
        ("recipe=gpt2 +model.options.depth=3", "a model that a program of your own registered"),
        ("recipe=gpt2 logger=csv logger.project=x", "logger=wandb"),
        ("recipe=lra-text sequence.path=x classifier.pattern_local=3", "other than dense"),
        ("recipe=lra-listops masked_pixels.share=0.2", "masked_pixels.weight above 0"),
        ("recipe=lra-listops sequence.path=x", "listops is generated"),
        ("recipe=pathfinder-preview pathfinder.test_images=3", "mode=evaluate"),
        ("recipe=pathfinder-preview trainer.steps=3", "what trains"),
        ("recipe=gpt2-long mode=train context=4096 lengths.window=64", "mode=lengths"),
    ],
)
def test_a_setting_that_nothing_heeds_is_refused_in_a_line_that_says_who_heeds_it(words: str, who: str) -> None:
    said = refused(words.split())
    assert said.split(" ")[0] in words
    assert "changes nothing with recipe=" in said
    assert re.search(who, said), said


@pytest.mark.parametrize(
    ("task", "words", "who"),
    [
        ("language_model", "mode=evaluate benchmark.rounds=3", "mode=benchmark"),
        ("language_model", "mode=evaluate passkey.trials=2", "mode=passkey"),
        ("language_model", "mode=evaluate model.size=355m", "as it was trained"),
        ("language_model", "mode=evaluate optimizer.learning_rate=1", "what trains"),
        ("language_model", "mode=evaluate trainer.steps=1", "what trains"),
        ("language_model", "mode=export output=x", "the checkpoint|that run's own folder"),
        ("language_model", "mode=export export_precision=float16", "of a classifier"),
        ("language_model", "mode=passkey generate.tokens=3", "mode=generate"),
        ("classification", "mode=evaluate classifier.layers=8", "trainings of a classifier"),
        ("classification", "mode=evaluate pathfinder.train_images=8", "trainings of a classifier"),
        ("classification", "mode=export pathfinder.side=64", "classifiers of"),
        ("masked_language_model", "mode=evaluate bert.size=tiny", "trainings of BERT"),
        ("masked_language_model", "mode=evaluate target_accuracy=0.7", "mode=train of recipe=bert"),
        ("fine_tuning", "mode=evaluate bert.size=tiny", "trainings of BERT"),
        ("fine_tuning", "mode=export finetune.batch=2", "recipe=finetune"),
    ],
)
def test_so_is_one_that_is_given_with_a_checkpoint(runs: dict[str, Path], task: str, words: str, who: str) -> None:
    said = refused([*words.split(), f"checkpoint={runs[task]}"])
    assert re.search(who, said), said


def test_a_run_is_not_of_another_recipe(runs: dict[str, Path]) -> None:
    words = ["mode=evaluate", f"checkpoint={runs['language_model']}"]
    assert check([*words, "recipe=gpt2"]).recipe == "gpt2"
    assert "is of recipe=gpt2" in refused([*words, "recipe=bert"])


@pytest.mark.parametrize("recipe", sorted(recipe_files()))
def test_a_recipes_own_lines_and_those_of_its_demo_are_never_refused(recipe: str) -> None:
    check([f"recipe={recipe}", "hardware.demo=always", "logger=none", "seed=3", "output=x"])


def test_what_the_demo_heeds_is_heeded() -> None:
    check(["recipe=pathx", "optimizer.momentum=0.9"])  # the demo's optimiser is muon
    assert "optimizer=muon" in refused(["recipe=pathx", "optimizer.momentum=0.9", "hardware.demo=never"])


def test_null_says_nothing_and_is_no_mistake() -> None:
    check(["recipe=gpt2", "weights=null", "benchmark.max_seconds=null", "resume=null"])


def test_a_stage_may_have_what_the_settings_have_not() -> None:
    stages = "curriculum.stages=[{side: 32, schedule: cosine}]"
    check(["recipe=pathx", "schedule=constant", "schedule.minimum_ratio=0", stages])


def test_of_a_sweep_one_job_must_heed_a_setting() -> None:
    jobs = sweep.expand(["recipe=gpt2", "optimizer=adamw,muon", "optimizer.momentum=0.9"])
    check_heeded_by_a_job([compose_settings(job) for job in jobs], jobs)
    jobs = sweep.expand(["recipe=gpt2", "optimizer=adamw,lamb", "optimizer.momentum=0.9"])
    with pytest.raises(UserError, match=r"optimizer\.momentum changes nothing"):
        check_heeded_by_a_job([compose_settings(job) for job in jobs], jobs)


def test_the_table_names_settings_that_exist() -> None:
    names = {*setting_names()}
    assert [name for rule in rules() for name in rule.names.split() if name not in names] == []


PUBLISHED = {asked_alike(command): command for command in published_commands() if words_of(command)}


def test_the_published_commands_are_found() -> None:
    assert len(published_commands()) > 100
    assert "recipe=gpt2 context=4096 attention=sdpa" in published_commands()


@pytest.mark.integration
@pytest.mark.parametrize("command", PUBLISHED.values())
def test_every_published_command_is_heeded_whole(command: str, runs: dict[str, Path], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    if "recipe=mine" in command:  # for the others, recipes are composed once: see quick_settings.py
        monkeypatch.setenv("FLASHTRAIN_RECIPES", str(runs["mine"]))
    for words in jobs_of(command, runs):
        check(words)


def test_a_mask_of_flashtrains_own_decoders_is_refused_for_a_transformers_model() -> None:
    words = ["recipe=hf", "model.path=somewhere", "mask=window", "mask.window=4"]
    with pytest.raises(UserError, match=r"mask changes nothing with recipe=hf .* flashtrain's own decoders"):
        check_all_heeded(compose_settings(words), words)
