"""mode=plan, evaluate, generate and export."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import TinyRuns, run_mode

from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.tasks.language.plan import plan_language as plan


def test_an_export_has_the_tokenizer_that_the_model_was_trained_with(trained) -> None:
    transformers = pytest.importorskip("transformers")
    assert run_mode("mode=export", f"checkpoint={trained}") == 0
    newest = max(trained.glob("export*"), key=lambda path: path.stat().st_mtime)
    model, tokenizer = (
        kind.from_pretrained(newest)
        for kind in (transformers.GPT2LMHeadModel, transformers.AutoTokenizer)
    )
    assert len(tokenizer) == model.config.vocab_size == 257
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 257)
    assert tokenizer("thé").input_ids == list("thé".encode())
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 32)
    assert not (newest / "tokenizer").exists()


@pytest.mark.parametrize(
    "problem", [OSError("No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"]
)
def test_an_export_that_ends_midway_leaves_nothing(trained, monkeypatch, problem) -> None:
    before = set(trained.iterdir())

    def ends(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("flashtrain.tasks.language.exports.save_tokenizer", ends)
    with pytest.raises(type(problem)):
        run_mode("mode=export", f"checkpoint={trained}")
    assert set(trained.iterdir()) == before


def test_a_misspelt_setting_is_refused_in_these_modes_too(trained) -> None:
    with pytest.raises(UserError, match="promt"):
        settings_from_checkpoint(["mode=generate", f"checkpoint={trained}", "promt=x"])


def test_what_is_given_with_a_checkpoint_replaces_the_runs_own(trained, tmp_path) -> None:
    words = [
        "memory.activation_checkpointing=full",
        "logger=none",
        "data=files",
        f"data.path={tmp_path}",
    ]
    settings = settings_from_checkpoint(
        ["mode=evaluate", f"checkpoint={trained}", *words, "hardware=cpu"]
    )
    assert (settings.memory.activation_checkpointing, settings.memory.offload) == ("full", False)
    assert (settings.data.source, settings.data.path) == ("files", str(tmp_path))
    assert (settings.logger.name, settings.hardware.accelerator) == ("none", "cpu")


@pytest.mark.parametrize(
    "words", [("mode=evaluate", "checkpoint="), ("resume=",)], ids=["evaluate", "resume"]
)
def test_another_group_named_with_a_run_is_refused_in_words(trained, words) -> None:
    said = (
        rf"schedule=linear replaces all schedule settings.*{words[-1]}.*its "
        r"run.*schedule\.NAME=VALUE"
    )
    with pytest.raises(UserError, match=said):
        settings_from_checkpoint([*words[:-1], f"{words[-1]}{trained}", "schedule=linear"])


def test_a_package_of_hydras_in_a_word_is_no_setting(trained) -> None:
    with pytest.raises(UserError, match="unknown setting 'data@x'"):
        settings_from_checkpoint(["mode=evaluate", f"checkpoint={trained}", "data@x=files"])
    with pytest.raises(UserError, match="unknown setting 'data@x'"):
        compose_settings(["recipe=gpt2", "data@x=files"])


def test_plan_names_parameters_tokens_memory_and_time_and_starts_nothing(
    tiny_runs: TinyRuns,
) -> None:
    words = tiny_runs.settings_words("mode=plan")
    settings, hardware = adapt_to_machine(compose_settings(words), CommandLine(words))
    before = set(tiny_runs.folder.iterdir())
    text = plan(settings, hardware)
    for part in (
        "parameters",
        "tokens: 1,536",
        "GiB",
        "time: about",
        "s a step",
        "MB of text",
        "epochs at 1 byte a token",
    ):
        assert part in text
    assert set(tiny_runs.folder.iterdir()) == before
    words = ["recipe=gpt2", "mode=plan", "hardware=cpu"]
    assert "MB of text: 0.1 epochs at" in plan(
        *adapt_to_machine(compose_settings(words), CommandLine(words))
    )
