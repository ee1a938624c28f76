"""From the command line's words to settings, and from a mistake to one readable line."""

from __future__ import annotations

from typing import get_args

import hydra
import pytest
from omegaconf import OmegaConf

from flashtrain.command import compose
from flashtrain.command.compose import apply_demo, compose_settings, override_keys, parse_overrides
from flashtrain.command.words import plain_words
from flashtrain.errors import UserError
from flashtrain.files.shipped import conf_folder
from flashtrain.settings.options import Checkpointing


@pytest.fixture(autouse=True)
def _all_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here Hydra composes each time, and not quick_settings.py in its place."""
    monkeypatch.setattr(compose, "compose", hydra.compose)


def test_a_recipe_overrides_the_defaults_and_the_command_line_overrides_the_recipe() -> None:
    assert compose_settings(["recipe=gpt2"]).model.vocab_rows == 50304
    assert compose_settings(["recipe=gpt2", "model.vocab_rows=50432"]).model.vocab_rows == 50432


def test_a_config_group_on_the_command_line_wins_over_the_recipes() -> None:
    settings = compose_settings(["recipe=gpt2", "model=modern", "attention=standard", "logger=none"])
    assert (settings.model.name, settings.attention.name, settings.logger.name) == ("modern", "standard", "none")


def test_every_setting_of_a_group_can_be_given_even_where_its_file_does_not_mention_it() -> None:
    settings = compose_settings(["recipe=gpt2", "hardware=cpu", "hardware.peak_tflops=100", "data.workers=3"])
    assert (settings.hardware.peak_tflops, settings.data.workers) == (100, 3)


def test_memory_names_a_kind_of_checkpointing() -> None:
    memory = compose_settings(["recipe=gpt2", "memory=full", "memory.ffn_chunk=4096"]).memory
    assert (memory.checkpointing, memory.offload, memory.ffn_chunk, memory.loss_chunk) == ("full", False, 4096, None)
    assert compose_settings(["recipe=gpt2"]).memory.checkpointing == "auto"
    files = {path.stem: OmegaConf.load(path) for path in (conf_folder() / "memory").glob("*.yaml")}
    assert {name: file.checkpointing for name, file in files.items()} == {
        name: name for name in get_args(Checkpointing)
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=gtp2"], r"unknown recipe 'gtp2'\. Did you mean 'gpt2'\? Possible: .*gpt2"),
        ([], r"which recipe\? Say recipe=NAME\. Possible: .*gpt2"),
        (["recipe=gpt2", "contxt=512"], r"unknown setting of task=language_model 'contxt'\. Did you mean 'context'"),
        (
            ["recipe=gpt2", "trainer.stps=3"],
            r"'trainer\.stps'\. Did you mean 'trainer\.steps'",
        ),
        (["recipe=gpt2", "+colour=red"], r"unknown setting of task=language_model 'colour'"),
        (["recipe=gpt2", "model=gpt3"], r"unknown model 'gpt3'\. Did you mean 'gpt2'"),
        (["recipe=gpt2", "attention=flsh"], r"unknown attention 'flsh'\. Did you mean 'flash'"),
        (["recipe=gpt2", "attention.name=flsh"], r"unknown attention 'flsh'\. Did you mean 'flash'"),
        (["recipe=gpt2", "trainer.strategy=dpp"], r"unknown trainer\.strategy 'dpp'\. Did you mean .*'ddp'"),
        (["recipe=gpt2", "mode=trian"], r"unknown mode 'trian'\. Did you mean 'train'"),
        (
            ["recipe=gpt2", "trainer={stepz: 3}"],
            r"'trainer\.stepz'\. Did you mean 'trainer\.steps'",
        ),
        (
            ["recipe=gpt2", "trainer={steps.x: 3}"],
            r"'trainer\.steps\.x'.* Possible: .*trainer\.steps",
        ),
        (["recipe=hf", "model.options={layers: 2}"], r"add a plus, \+model\.options\.layers=\.\.\."),
        (["recipe=gpt2", "context=abc"], r"context: Value 'abc' .* to Integer\. Possible: a whole number\."),
        (["recipe=gpt2", "model.vocab_rows=x"], r"model\.vocab_rows: Value 'x' .* Possible: a whole number, or null\."),
        (["recipe=gpt2", "optimizer.betas=0.9"], r"optimizer\.betas: .* Possible: a list of numbers: \[0.1,0.2\]\."),
        (["recipe=gpt2", "optimizer.betas=[a,b]"], r"optimizer\.betas\[0\]: .* Possible: a list of numbers"),
        (["recipe=gpt2", "optimizer.betas=[[1],2]"], r"optimizer\.betas=\[\[1\], 2.0\]\. Possible: a list of numbers"),
        (
            ["recipe=hf-speed", "benchmark.contexts=[{a:1}]"],
            r"benchmark\.contexts=.* Possible: a list of whole numbers",
        ),
        (["recipe=hf-long", "benchmark.models=llama-1b"], r"benchmark\.models: .* Possible: a list: \[one,another\]\."),
        (["recipe=hf", "model.adapter_targets=a,b"], r"lists several values: .* A list has brackets: \[one,another\]"),
        (["recipe=gpt2", "data.path=[a,b]"], r"data\.path: .* Possible: text, or null\."),
        (
            ["recipe=hf", "model.adapter=lora", "model=huggingface", "model.adapter_targets=[]"],
            r"adapter_targets=\[\]\. Possible: all-linear, or layers' names",
        ),
        (["recipe=gpt2", "context=0"], r"context=0 must be at least 1"),
        (["recipe=gpt2", "context"], r"cannot read 'context': settings are given as name=value"),
        (["recipe=gpt2", "context=512,1024"], r"'context=512,1024' lists several values: add -m"),
        (["recipe=gpt2", "data=hub"], r"data=hub needs data\.name"),
        (["recipe=gpt2", "data=files"], r"data=files needs data\.path"),
        (["recipe=gpt2", "data.vocab=v.json"], r"data\.vocab and data\.merges belong together"),
        (["recipe=gpt2", "optimizer.betas=[0.9]"], r"optimizer\.betas=\[0\.9\] must be two numbers"),
        (["recipe=gpt2", "memory.checkpointing=ful"], r"unknown memory\.checkpointing 'ful'\. Did you mean .*'full'"),
        (["recipe=gpt2", "memory=none", "memory.offload=true"], r"choose memory=selective, memory=full or memory=auto"),
        (["recipe=gpt2", "model.options.depth=3"], r"\+model\.options\.depth=\.\.\."),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_possible(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compose_settings(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=gpt2", "context=1000"], r"tokens_per_step=65536 is no multiple of context=1000.* 65000 would do"),
        (["recipe=gpt2", "trainer.devices=3"], r"a step of 64 samples .* does not divide over 3 devices"),
        (["recipe=gpt2", "trainer.micro_batch=7"], r"micro_batch=7 does not divide .* 1, 2, 4, 8, 16, 32, 64"),
    ],
)
def test_a_step_that_is_not_whole_samples_is_refused_with_what_would_do(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose_settings(words).check_step()


def test_a_users_own_folder_of_recipes_is_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine\ncontext: 128\ntrainer: {tokens_per_step: 1280}\n")
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    settings = compose_settings(["recipe=mine"])
    assert (settings.recipe, settings.context) == ("mine", 128)


def test_a_recipe_file_that_is_no_yaml_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.yaml").write_text("context: [1\n")
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    with pytest.raises(UserError, match=r"broken\.yaml is no valid YAML"):
        compose_settings(["recipe=broken"])


def test_so_is_one_that_is_no_page_of_settings(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.yaml").write_text("- a\n")
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    with pytest.raises(UserError, match=r"broken\.yaml"):
        compose_settings(["recipe=broken"])


def test_the_demo_replaces_the_recipes_settings_but_not_the_command_lines() -> None:
    words = ["recipe=gpt2", "trainer.steps=7"]
    demo = apply_demo(compose_settings(words), words)
    assert demo.is_demo
    assert (demo.model.size, demo.context, demo.data.tokenizer, demo.trainer.steps) == ("demo", 256, "bytes", 7)


@pytest.mark.parametrize(("context", "tokens"), [(1024, 2048), (4096, 4096), (1000, 3000)])
def test_a_demos_step_is_whole_samples_of_another_context(context, tokens) -> None:
    words = ["recipe=gpt2", f"context={context}"]
    assert apply_demo(compose_settings(words), words).trainer.tokens_per_step == tokens
    words = ["recipe=gpt2", f"context={context}", "trainer.tokens_per_step=8000"]
    assert apply_demo(compose_settings(words), words).trainer.tokens_per_step == 8000


@pytest.mark.parametrize(
    "text",
    [
        "def main",
        "import ",
        "a, 'b' and \"c\"",
        "x = {1: [2]}",
        "back\\slash",
        "${home}",
        "",
        "it's",
        "(a)=b,c",
        "end\\",
    ],
)
def test_a_prompt_may_be_any_text(text: str) -> None:
    (override,) = parse_overrides(plain_words([f"prompt={text}"]))
    assert OmegaConf.create({"prompt": override.value()}).prompt == text


def test_override_keys_names_settings_without_their_signs() -> None:
    assert override_keys(["+a.b=1", "++c=2", "recipe=gpt2"]) == {"a.b", "c", "recipe"}


def test_a_value_that_an_interpolation_stands_for_is_not_printed(monkeypatch) -> None:
    monkeypatch.setenv("PASSWORD", "the-secret")
    with pytest.raises(UserError) as caught:
        compose_settings(["recipe=gpt2", "trainer.steps=${oc.env:PASSWORD}"])
    message = str(caught.value)
    assert message.startswith("trainer.steps: ")
    assert "${oc.env:PASSWORD}" in message
    assert "the-secret" not in message
