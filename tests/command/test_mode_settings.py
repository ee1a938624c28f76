"""A setting that a command names is one of its task's, and one that its mode uses."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError
from itertools import chain
from pathlib import Path

import pytest
from published_commands import saved_runs

from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.command.mode_settings import NOT_TRAINED, USED, check_used
from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.files.shipped import recipe_files
from flashtrain.folders.run_folder import read_settings
from flashtrain.mode import modes
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.schema import all_settings
from flashtrain.spec import tasks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_runs(tmp_path_factory.mktemp("runs"))


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        settings_of(plain_words(words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=gpt2", "recipe=bert"],
        ["trainer.steps=1", "++trainer.steps=2"],
        ["model=gpt2", "model=llama"],
        ["+model.options.a=1", "model.options.a=2"],
        ["prompt=a", "~prompt"],
    ],
)
def test_a_setting_that_is_given_twice_is_refused(words: list[str]) -> None:
    with pytest.raises(
        UserError, match=rf"{words[0].strip('+').split('=')[0]} is given twice, as "
    ):
        CommandLine(words).check_given_once()


def test_a_group_and_settings_in_it_are_not_the_same_and_hydras_own_may_come_twice() -> None:
    CommandLine(
        ["recipe=gpt2", "optimizer=lamb", "optimizer.learning_rate=1", "context=1,2"]
    ).check_given_once()
    CommandLine(["recipe=gpt2", "hydra.run.dir=a", "hydra.run.dir=b"]).check_given_once()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            "recipe=gpt2 bert.size=base",
            "is a setting of task=masked_language_model and fine_tuning, not of",
        ),
        ("recipe=bert model.size=355m", "Use bert.size"),
        ("recipe=pathx data=files", "is a setting of task="),
        (
            "recipe=lra-image task=language_model sequence.batch=2",
            "is a setting of task=classification",
        ),
        ("recipe=gpt2 trainer.stps=5", "Did you mean 'trainer.steps'"),
        ("recipe=gpt2 +x=5", "unknown setting 'x'. `python -m flashtrain --help` lists settings."),
        ("recipe=gpt2 lr=3e-4", "Use optimizer.learning_rate"),
    ],
)
def test_a_setting_of_another_task_is_unknown(words: str, hint: str) -> None:
    said = refused(*words.split())
    assert hint in said


def test_so_is_one_that_a_recipe_names(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine\nbert: {size: base}\n")
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    assert "bert" in refused("recipe=mine")
    (tmp_path / "yours.yaml").write_text(
        "# Yours\ntask: classification\ndefaults: [override /model: llama]\n"
    )
    assert "model" in refused("recipe=yours")


@pytest.mark.parametrize(
    "words",
    [
        "recipe=gpt2 benchmark.contexts=[512]",
        "recipe=gpt2 lengths.contexts=[64]",
        "recipe=gpt2 checkpoint=x",
        "recipe=gpt2-speed benchmark.seqlens=[512]",
        "recipe=gpt2-speed trainer.steps=3",
        "recipe=gpt2-speed context_parallel=2",
        "recipe=attention-benchmark attention=sdpa",
        "recipe=bert-speed bert.size=base",
        "recipe=lra-speed classifier.layers=2",
        "recipe=gpt2-long mode=train context=4096 lengths.window=64",
        "recipe=gpt2 model.size=355m weights=x",
        "recipe=bert-finetune bert.size=base weights=x",
    ],
)
def test_a_setting_that_the_mode_does_not_use_is_refused(words: str) -> None:
    said = refused(*words.split())
    assert " is not used " in said
    assert said.split(" ")[0] in words


@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("recipe", ["gpt2-speed", "attention-benchmark", "pathfinder-preview"])
def test_a_recipe_that_measures_is_not_trained_or_evaluated(recipe: str, mode: str) -> None:
    words = [f"recipe={recipe}", f"mode={mode}"]
    with pytest.raises(UserError, match=f"mode={mode}: recipe={recipe} "):
        check_used(compose_settings(words), CommandLine(words))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("language_model", "mode=evaluate benchmark.rounds=3"),
        ("language_model", "mode=evaluate model.size=355m"),
        ("language_model", "mode=evaluate trainer.steps=1"),
        ("language_model", "mode=export output=x"),
        ("language_model", "mode=ruler generate.max_new_tokens=3"),
        ("language_model", "mode=ruler data=stdlib"),
        ("classification", "mode=evaluate classifier.layers=8"),
        ("classification", "mode=export pathfinder.side=64"),
        ("fine_tuning", "mode=export finetune.batch=2"),
    ],
)
def test_so_is_one_that_is_given_with_a_checkpoint(
    runs: dict[str, Path], task: str, words: str
) -> None:
    said = refused(*words.split(), f"checkpoint={runs[task]}")
    assert said.startswith(words.split(" ")[1].split("=")[0])
    assert " is not used " in said


def test_a_run_is_not_of_another_recipe(runs: dict[str, Path]) -> None:
    words = ["mode=evaluate", f"checkpoint={runs['language_model']}"]
    assert settings_of([*words, "recipe=gpt2"]).recipe == "gpt2"
    assert "is of recipe=gpt2" in refused(*words, "recipe=bert")


def test_a_run_to_go_on_with_needs_no_recipe(runs: dict[str, Path]) -> None:
    run = runs["language_model"]
    settings = settings_of([f"resume={run}", "trainer.steps=70"])
    own = read_settings(run)
    assert (settings.mode, settings.recipe, settings.resume) == ("train", own.recipe, str(run))
    assert (settings.context, settings.data, settings.trainer.steps) == (own.context, own.data, 70)
    assert "no recipe given" in refused("resume=auto")


def test_an_unknown_mode_is_named_before_a_missing_recipe() -> None:
    assert refused("mode=trane", "checkpoint=x").startswith(
        "unknown mode 'trane'. Did you mean 'train'?"
    )
    assert refused("mode=chat", "checkpoint=x") == "mode=chat: use mode=generate."


@pytest.mark.parametrize("recipe", sorted(recipe_files()))
def test_a_recipes_own_lines_are_never_refused(recipe: str) -> None:
    named = ["model.path=x", "data.path=y"] if recipe == "sft" else []  # which only a user can name
    settings_of(
        [f"recipe={recipe}", *named, "hardware.demo=always", "logger=none", "seed=3", "output=x"]
    )


def test_the_tables_name_settings_that_exist() -> None:
    names = {name for name, _, _ in all_settings()}
    named = [*USED.values(), NOT_TRAINED, *(mode.own for mode in modes().values())]
    for task in tasks().values():
        named += [*task.modes.values(), task.same, task.shape, task.trained]
    assert set(chain(*named)) <= names


@pytest.mark.parametrize("words", ["recipe=hf mode=plan", "recipe=sft model.path=x data.path=y"])
def test_a_missing_extra_is_named_before_anything_else(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("flashtrain.settings.model.version", version)
    assert "flashtrain[hub]" in refused(*words.split())


def test_a_text_that_is_given_is_scored_whole(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["language_model"], tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("validation_tokens: null", "validation_tokens: 9")
    )

    def scored(*words: str) -> int | None:
        line = ["mode=evaluate", f"checkpoint={run}", *words]
        return settings_from_checkpoint(line).data.validation_tokens

    text = ("data.source=files", "data.path=x")
    assert (scored(), scored(*text)) == (9, None)
    assert scored(*text, "data.validation_tokens=512") == 512
