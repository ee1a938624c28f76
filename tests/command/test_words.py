"""What a user types in another form than Hydra's is understood, or told in one line how it is given here."""

from __future__ import annotations

import pytest

from flashtrain import registry
from flashtrain.command.words import plain_words
from flashtrain.errors import UserError
from flashtrain.models.gpt2 import FAMILIES, POSITIONS, RESIDUALS, SIZES
from flashtrain.settings import groups


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("recipe=GPT2", "recipe=gpt2"),
        ("model=GPT2", "model=gpt2"),
        ("model.size=124M", "model.size=124m"),
        ("model.size=124M,355M", "model.size=124m,355m"),
        ("model.positions=Rotary", "model.positions=rotary"),
        ("data.tokenizer=BPE", "data.tokenizer=bpe"),
        ("hardware.precision=BF16-mixed", "hardware.precision=bf16-mixed"),
        ("mode=Plan", "mode=plan"),
        ("bert.size=Large", "bert.size=large"),
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
        "data.path=1e3",
        "data.name=Org/Name",
        "data.text_column=Text",
        "hydra.run.dir=Runs/1e3",
        "~resume",
        "-m",
        "--multirun",
        "--cfg=job",
        "~model",
        "model=gpt2,modern",
        "job",  # of --cfg
    ],
)
def test_everything_else_stays_as_it_is_given(word: str) -> None:
    assert plain_words([word]) == [word]


def test_a_prompt_may_hold_anything_and_a_model_of_ones_own_has_sizes_of_its_own() -> None:
    assert plain_words(["prompt=A, 'b'\n1e6"]) == ["prompt='A, \\'b\\'\n1e6'"]
    assert plain_words(["model.name=mine", "model.size=124M"])[1] == "model.size=124M"


def test_what_a_program_registered_is_named_like_what_ships(monkeypatch) -> None:
    monkeypatch.setitem(registry._components["model"], "tiny", object)
    monkeypatch.setitem(registry._components["source"], "wiki", object)
    assert plain_words(["model=tiny", "data=wiki"]) == ["model.name=tiny", "data.source=wiki"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trainer=null"], r"unknown trainer 'null'\. Possible: default\."),
        (["attention=false"], r"unknown attention 'false'\. .*Possible: flash, sdpa, standard\."),
        (["schedule=0.5"], r"unknown schedule '0\.5'\. Possible: constant, cosine, linear\."),
        (["logger="], r"unknown logger ''\. Possible: csv, none, tensorboard, wandb\."),
        (["+=3"], r"cannot read '\+=3': settings are given as name=value\."),
        (["output=a\nb"], r"output= has a line break in its value"),
        (["--context", "512"], r"unknown flag --context: .* without dashes\. Did you mean context=512\?"),
        (["--tokens-per-step=512"], r"Did you mean trainer\.tokens_per_step=512\?"),
        (["--contxt", "512"], r"Did you mean context=512\?"),
        (["--steps"], r"Did you mean trainer\.steps=\.\.\.\?"),
        (["--nothing-like-it"], r"unknown flag --nothing-like-it: settings are given as name=value, without dashes\.$"),
    ],
)
def test_a_mistake_of_form_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        plain_words(["recipe=gpt2", *words])
    assert "\n" not in str(refused.value)


def test_the_names_in_the_settings_are_those_of_the_models() -> None:
    assert set(groups.DECODER_SIZES) == set(SIZES)
    assert set(FAMILIES) < set(groups.DECODERS)
    assert (groups.POSITIONS, groups.RESIDUALS) == (POSITIONS, RESIDUALS)
