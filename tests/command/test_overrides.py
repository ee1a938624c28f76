"""What a user types in another form than Hydra's is understood, or answered in one
line how it is given here."""

from __future__ import annotations

from typing import get_args

import pytest
from omegaconf import OmegaConf

from flashtrain import registry
from flashtrain.command.compose import compose_settings
from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.command.sweep import expand
from flashtrain.errors import UserError
from flashtrain.models.decoder_config import FAMILIES, SIZES
from flashtrain.settings import options
from flashtrain.settings.command_line import CommandLine


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("recipe=GPT2", "recipe=gpt2"),
        ("model=GPT2", "model=gpt2"),
        ("model.size=124M,355M", "model.size=124m,355m"),
        ("hardware.precision=BF16-mixed", "hardware.precision=bf16-mixed"),
        ("mode=Plan", "mode=plan"),
        ("trainer.steps=1e6", "trainer.steps=1000000"),
        ("trainer.steps=1e3,2E3", "trainer.steps=1000,2000"),
        ("benchmark.seqlens=[1e3,2048]", "benchmark.seqlens=[1000,2048]"),
        ("++trainer.tokens_per_step=1.5e5", "++trainer.tokens_per_step=150000"),
    ],
)
def test_names_in_capitals_and_powers_of_ten_are_what_they_mean(given: str, read: str) -> None:
    assert plain_words([given]) == [read]


@pytest.mark.parametrize(
    "word",
    [
        "optimizer.learning_rate=1e-3",
        "optimizer.epsilon=1e8",  # no whole number
        "trainer.steps=1.5e0",
        "data.name=Org/Name",
        "data.text_column=Text",
        "hydra.run.dir=Runs/1e3",
        "~resume",
        "-m",
        "--cfg=job",
        "model.adapter_targets=[Up,'down']",
        "~model",
        "model=gpt2,llama",
        "job",  # of --cfg
    ],
)
def test_everything_else_stays_as_it_is_given(word: str) -> None:
    assert plain_words([word]) == [word]


def test_a_prompt_may_hold_anything_and_a_model_of_ones_own_has_sizes_of_its_own() -> None:
    for text in (
        "null",
        "A, 'b'\n1e6",
        "x = {1: [2]}",
        "back\\slash",
        "${home}",
        "",
        "(a)=b,c",
        "end\\",
    ):
        (override,) = CommandLine(plain_words([f"prompt={text}"])).overrides
        assert OmegaConf.create({"prompt": override.value()}).prompt == text
    assert plain_words(["model.name=mine", "model.size=124M"])[1] == "model.size=124M"


@pytest.mark.parametrize(
    "text",
    [
        "epoch=1-step=10.ckpt",
        "runs/lr=0.1,wd=0/run",
        "a b/[c] (d) {e: f}",
        "it's",
        "~/é",
        "1e3",
        "007",
        "true",
    ],
)
@pytest.mark.parametrize(
    "key", ["checkpoint", "data.path", "data.tokenizer", "++model.path", "finetune.path"]
)
def test_a_path_is_the_text_that_was_typed(key: str, text: str) -> None:
    words = plain_words([f"{key}={text}"])
    (override,) = CommandLine(words).overrides
    assert override.value() == text
    assert plain_words(words) == words  # ranks read the command's words once more
    jobs = expand(CommandLine(plain_words(["-m", f"{key}={text}"])[1:]))
    swept = [job.overrides[0].value() for job in jobs]
    assert swept == text.split(",")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("'lr=0.1,wd=0/run'", "lr=0.1,wd=0/run"),
        ('"a b"', "a b"),
        (r"a\=b\,c", "a=b,c"),
        ("null", None),
        ("", ""),
        ("${oc.env:HOME}/x", "${oc.env:HOME}/x"),
    ],
)
def test_a_path_in_hydras_own_form_is_read_as_hydra_does(value: str, read: str | None) -> None:
    (override,) = CommandLine(plain_words([f"checkpoint={value}"])).overrides
    assert override.value() == read


def test_commas_of_a_sweep_separate_paths_outside_quotes() -> None:
    given = [
        "-m",
        "recipe=gpt2",
        "data=files",
        "data.path=a=1/x,'b,c'",
        "logger.group=choice(d,e)",
        "prompt=f, g",
    ]
    jobs = expand(CommandLine(plain_words(given)[1:]))
    assert [compose_settings(job).data.path for job in jobs] == ["a=1/x", "a=1/x", "b,c", "b,c"]
    assert [compose_settings(job).logger.group for job in jobs] == ["d", "e", "d", "e"]
    assert {compose_settings(job).prompt for job in jobs} == {"f, g"}


def test_what_a_program_registered_is_named_like_what_ships(monkeypatch) -> None:
    monkeypatch.setitem(registry._components["model"], "tiny", object)
    monkeypatch.setitem(registry._components["source"], "wiki", object)
    assert plain_words(["model=tiny", "data=wiki"]) == ["model.name=tiny", "data.source=wiki"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trainer=null"], r"unknown trainer 'null'\. Expected one of: default\."),
        (["logger="], r"unknown logger ''\. Expected one of: csv, none, tensorboard, wandb\."),
        (["+=3"], r"unexpected argument '\+=3'\. Settings are name=value"),
        (["output=a\nb"], r"output= has a line break in its value"),
        (["--context", "512"], r"unknown flag --context: .* without dashes\. Use context\."),
        (["--tokens-per-step=512"], r"Use trainer\.tokens_per_step\."),
        (["--steps"], r"Use trainer\.steps\."),
        (
            ["--nothing-like-it"],
            r"unknown flag --nothing-like-it: .*\. The flags are --help, --version, --multirun",
        ),
        (["--config-name=other"], r"unknown flag --config-name: settings are name=value"),
        (["model=/models/mine"], r"Use model\.path=/models/mine with recipe=hf or sft\."),
        (
            ["data=some/texts"],
            r"Use data=files data\.path=some/texts or data=hub data\.name=some/texts\.",
        ),
    ],
)
def test_a_mistake_of_form_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        plain_words(["recipe=gpt2", *words])
    assert "\n" not in str(refused.value)


def test_the_names_in_the_settings_are_those_of_the_models() -> None:
    assert set(get_args(options.DecoderSize)) == set(SIZES)
    assert set(FAMILIES) == set(get_args(options.DecoderName))


@pytest.mark.parametrize(
    "group", ["logger", "optimizer", "schedule", "data", "hardware", "attention"]
)
@pytest.mark.parametrize("value", ["nan", "inf", "[1,2]", "[]"])
def test_a_group_is_chosen_by_a_name_and_by_nothing_else(group: str, value: str) -> None:
    with pytest.raises(UserError, match=f"unknown {group} '.*Expected one of: "):
        settings_of(plain_words(["recipe=gpt2", f"{group}={value}"]))
