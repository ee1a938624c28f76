"""From the command line's words to settings, and from a mistake to one readable line."""

from __future__ import annotations

import hydra
import pytest

from flashtrain import registry
from flashtrain.command import compose
from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.run.machine import apply_demo
from flashtrain.settings.command_line import CommandLine


@pytest.fixture(autouse=True)
def _all_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here Hydra composes each time, and not quick_settings.py in its place."""
    monkeypatch.setattr(compose, "compose", hydra.compose)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=gtp2"], r"unknown recipe 'gtp2'\. Did you mean 'gpt2'\? Expected one of: .*gpt2"),
        ([], r"recipe=NAME, one of: .*gpt2"),
        (["recipe=gpt2", "contxt=512"], r"unknown setting 'contxt'\. Did you mean 'context'"),
        (["recipe=gpt2", "model=gpt3"], r"unknown model 'gpt3'\. Did you mean 'gpt2'"),
        (
            ["recipe=gpt2", "trainer={stepz: 3}"],
            r"'trainer\.stepz'\. Did you mean 'trainer\.steps'",
        ),
        (
            ["recipe=hf", "model.options={layers: 2}"],
            r"Add a plus: \+model\.options\.layers=\.\.\.",
        ),
        (["recipe=gpt2", "context=abc"], r"context: Value 'abc' .* to Integer"),
        (
            ["recipe=gpt2", "optimizer.betas=0.9"],
            r"optimizer\.betas: .* Expected a list of numbers: \[0.1,0.2\]\.",
        ),
        (
            ["recipe=hf-long", "benchmark.models=llama-1b"],
            r"benchmark\.models: .* Expected a list: \[one,another\]\.",
        ),
        (
            ["recipe=hf", "model.adapter_targets=a,b"],
            r"lists several values\. .* brackets for a list: \[one,another\]",
        ),
        (["recipe=gpt2", "data.path=[a,b]"], r"data\.path: "),
        (
            ["recipe=hf", "model.adapter=lora", "model=huggingface", "model.adapter_targets=[]"],
            r"adapter_targets=\[\]\. Expected all-linear, or layers' names",
        ),
        (["recipe=gpt2", "context=0"], r"context=0 must be at least 1"),
        (["recipe=gpt2", "context"], r"unexpected argument 'context'"),
        (["recipe=gpt2", "context=512,1024"], r"'context=512,1024' lists several values\. Add -m"),
        (["recipe=gpt2", "data=files"], r"data=files needs data\.path"),
        (["recipe=gpt2", "data.vocab=v.json"], r"data\.vocab and data\.merges belong together"),
        (
            ["recipe=gpt2", "memory.activation_checkpointing=ful"],
            r"unknown memory\.activation_checkpointing 'ful'\. Did you mean .*'full'",
        ),
        (
            ["recipe=gpt2", "memory.activation_checkpointing=none", "memory.offload=true"],
            "memory.offload",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_possible(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compose_settings(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["recipe=gpt2", "context=1000"],
            r"tokens_per_step=65536 must be a multiple of context=1000.* Use 65000",
        ),
        (
            ["recipe=gpt2", "trainer.devices=3"],
            r"a step of 64 samples .* does not divide over 3 devices",
        ),
        (
            ["recipe=gpt2", "trainer.micro_batch=7"],
            r"micro_batch=7 does not divide .* 1, 2, 4, 8, 16, 32, 64",
        ),
    ],
)
def test_a_step_that_is_not_whole_samples_is_refused_with_what_would_do(
    words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compose_settings(words).check_step()


@pytest.mark.parametrize("text", ["context: [1\n", "- a\n"], ids=["no YAML", "no settings"])
def test_a_recipe_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, text: str) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    with pytest.raises(UserError, match=r"broken\.yaml"):
        compose_settings(["recipe=broken"])


def test_a_choice_of_a_group_in_a_recipe_file_is_answered_with_the_line_for_it(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "mine.yaml").write_text("logger: none\n")
    monkeypatch.setenv("FLASHTRAIN_RECIPES", str(tmp_path))
    with pytest.raises(UserError, match="under defaults, as `- override /logger: none`"):
        compose_settings(["recipe=mine"])
    (tmp_path / "mine.yaml").write_text("defaults: [override /logger: none, _self_]\n")
    assert compose_settings(["recipe=mine"]).logger.kinds == ["none"]


def test_the_demo_replaces_the_recipes_settings_but_not_the_command_lines() -> None:
    words = ["recipe=gpt2", "trainer.steps=7"]
    demo = apply_demo(compose_settings(words), CommandLine(words).by_name)
    assert demo.is_demo
    assert (demo.model.size, demo.context, demo.data.tokenizer, demo.trainer.steps) == (
        "demo",
        256,
        "bytes",
        7,
    )


@pytest.mark.parametrize(("context", "tokens"), [(1024, 2048), (4096, 4096), (1000, 3000)])
def test_a_demos_step_is_whole_samples_of_another_context(context, tokens) -> None:
    words = ["recipe=gpt2", f"context={context}"]
    assert (
        apply_demo(compose_settings(words), CommandLine(words).by_name).trainer.tokens_per_step
        == tokens
    )
    words = ["recipe=gpt2", f"context={context}", "trainer.tokens_per_step=8000"]
    assert (
        apply_demo(compose_settings(words), CommandLine(words).by_name).trainer.tokens_per_step
        == 8000
    )


def test_a_value_that_an_interpolation_stands_for_is_not_printed(monkeypatch) -> None:
    monkeypatch.setenv("PASSWORD", "the-secret")
    with pytest.raises(UserError) as caught:
        compose_settings(["recipe=gpt2", "trainer.steps=${oc.env:PASSWORD}"])
    message = str(caught.value)
    assert message.startswith("trainer.steps: ")
    assert "${oc.env:PASSWORD}" in message
    assert "the-secret" not in message


def test_a_mistyped_model_is_answered_with_those_that_a_program_registers(monkeypatch) -> None:
    monkeypatch.setitem(registry._components["model"], "one-block", lambda settings, **_: None)
    with pytest.raises(UserError) as refused:
        compose_settings(["recipe=gpt2", "model=one-blok"])
    assert str(refused.value).startswith("unknown model 'one-blok'. Did you mean 'one-block'?")
    assert "gpt2, huggingface, llama, one-block" in str(refused.value)
    assert "known to that program's own command" in str(refused.value)
