"""mode=check: the table and the exit status."""

from __future__ import annotations

from copy import copy

import pytest
import torch
from tiny_runs import run_mode

from flashtrain import registry
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.overrides import plain_words
from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.settings.mask import MaskSettings
from flashtrain.tasks.language.task import LanguageModel
from flashtrain_kernels import Mask, masks

SMALL = "model.options={hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2}"


@pytest.mark.parametrize(
    "words",
    [
        ("model.config=qwen3", f"+{SMALL}"),
        ("recipe=gpt2", "model.size=demo"),
        ("recipe=gpt2", "model=llama", "model.size=demo", "mask=window", "mask.window=20"),
        ("recipe=gpt2", "model=llama", "model.size=demo", "mask=chunked", "mask.chunk=32"),
        ("recipe=gpt2", "model=llama", "model.size=demo", "mask=prefix", "mask.prefix=50"),
        ("recipe=gpt2", "model=llama", "model.size=demo", "model.pattern=[window:9,full]"),
    ],
    ids=" ".join,
)
def test_models_that_flashtrain_trains_have_no_fault(words: tuple[str, ...], caplog) -> None:
    caplog.set_level("INFO")
    assert run_mode("mode=check", "hardware=cpu", *words) == 0
    printed = caplog.text
    assert "FAULT" not in printed
    assert "ok    one rank equals 2" in printed


def test_a_run_is_checked_with_its_own_model(tiny_runs, caplog) -> None:
    status, run = tiny_runs.run("llama", "context=256", "model=llama", "trainer.micro_batch=1")
    assert status == 0
    caplog.set_level("INFO")
    assert run_mode("mode=check", f"checkpoint={run}") == 0
    assert "ok    documents apart" in caplog.text


def test_a_fault_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Recurrences that are computed as transformers does."""
    caplog.set_level("INFO")
    monkeypatch.setattr(HuggingFaceDecoder, "_rows", lambda *_: None)
    words = ("model.config=lfm3", f"+{SMALL}", "hardware=cpu")
    assert run_mode("mode=check", *words) == 1
    assert "FAULT documents apart" in caplog.text


@pytest.mark.parametrize(
    "words", [("mask=window", "mask.window=256"), ("mask=prefix", "mask.prefix=50")]
)
def test_a_mask_of_the_settings_that_is_dropped_is_a_fault(words, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    loss = LanguageModel.batch_loss
    monkeypatch.setattr(
        LanguageModel, "batch_loss", lambda self, batch: loss(unmasked(self), batch)
    )
    model = ("recipe=gpt2", "model=llama", "model.size=demo", "hardware=cpu")
    assert run_mode("mode=check", *model, *words) == 1
    assert "FAULT layer 0: attention" in caplog.text


def unmasked(module: LanguageModel) -> LanguageModel:
    """The module without its mask; documents stay apart."""
    twin = copy(module)
    twin.__dict__["mask"] = None
    return twin


def test_layers_that_a_training_refuses_to_share_are_not_shared(caplog) -> None:
    caplog.set_level("INFO")
    layers = ("model.kv_heads=2", "model.pattern=[kdgqa]")
    words = ("recipe=gpt2", "model.size=demo", "hardware=cpu", *layers)
    assert run_mode("mode=check", *words) == 0
    assert "-     one rank equals 2" in caplog.text
    assert "layers of kdgqa" in caplog.text


@pytest.mark.parametrize("documents", [False, True])
def test_a_registered_mask_must_keep_documents_apart_only_where_that_is_set(
    documents: bool, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    caplog.set_level("INFO")
    copies = {group: dict(own) for group, own in registry._components.items()}
    monkeypatch.setattr(registry, "_components", copies)
    registry.register("mask", "near")(near)
    given = ("mask=near", f"mask.documents={documents}")
    model = ("recipe=gpt2", "model=llama", "model.size=demo", "hardware=cpu")
    assert run_mode(*plain_words(["mode=check", *model, *given])) == documents
    assert f"{'FAULT' if documents else '-    '} documents apart" in caplog.text
    assert "ok    layer 0: attention, masked               token 40 reaches tokens 40 to 47" in (
        caplog.text
    )


def near(_: MaskSettings, *, seqlen: int, device: torch.device, **given: torch.Tensor) -> Mask:
    return masks.sliding_window(seqlen, (7, 0), device=device)


def test_a_decoder_of_transformers_is_checked_as_it_is_trained_here(caplog) -> None:
    caplog.set_level("INFO")
    run_mode("mode=check", "model.config=qwen3", f"+{SMALL}", "hardware=cpu")
    assert "as recipe=hf computes it; as transformers does alone: flashtrain.check" in caplog.text


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"mode=check .* expected a language model"):
        settings_from_checkpoint(["mode=check", "recipe=bert"])
    with pytest.raises(UserError, match=r"mode=check needs checkpoint=.*model\.path"):
        settings_from_checkpoint(["mode=check"])
