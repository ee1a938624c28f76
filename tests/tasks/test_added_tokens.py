"""A tokenizer that has more tokens than the model: embeddings get rows, which are trained,
resumed and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import TinyRuns
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import flashtrain
from flashtrain.errors import UserError
from flashtrain.integrations import huggingface_model
from flashtrain.settings.model import ModelSettings
from flashtrain.training.checkpoints import read_checkpoint

OLD, TOKENS, ROWS = 250, 265, 320


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def fewer(request, base: Path, tmp_path: Path) -> Path:
    """The tiny Llama with fewer embeddings than its tokenizer has tokens."""
    folder = tmp_path / "fewer"
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    shape = {**LlamaConfig.from_pretrained(base).to_dict(), "vocab_size": OLD}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**{**shape, "tie_word_embeddings": request.param})
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **more) -> ModelSettings:
    return ModelSettings(name="huggingface", path=str(folder), **more)


def test_added_rows_are_transformers_mean_and_the_others_as_they_were(
    fewer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    huggingface_model._say_once.cache_clear()
    with caplog.at_level("INFO", "flashtrain"):
        model = huggingface_model.build(settings(fewer), vocab_size=TOKENS, context=64)
    assert f"{ROWS - OLD} rows are added" in caplog.text
    model.materialise(torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(fewer)
    theirs.resize_token_embeddings(ROWS, mean_resizing=True)
    ours = model.module.state_dict()
    for name, one in theirs.state_dict().items():
        # They draw around the mean, with a billionth of the rows' variance.
        torch.testing.assert_close(ours[name], one, rtol=0, atol=3e-4)
        torch.testing.assert_close(ours[name][:OLD], one[:OLD], rtol=0, atol=0)
    tied = model.module.config.tie_word_embeddings
    assert (model.output_weight is model.module.get_input_embeddings().weight) == tied


def test_they_are_trained_exported_and_resumed_exactly(
    fewer: Path, words: list[str], tmp_path: Path
) -> None:
    given = [*words, f"model.path={fewer}", "trainer.checkpoint_every=1"]
    whole = TinyRuns(tmp_path, given).finished(tmp_path / "whole")
    runs = TinyRuns(tmp_path, given)
    stopped = runs.finished(tmp_path / "stopped", "trainer.steps=1", "schedule=constant")
    assert read_checkpoint(stopped / "checkpoints" / "last.ckpt")["global_step"] == 1
    constant = runs.finished(tmp_path / "constant", "schedule=constant")
    _, resumed = runs.run("resumed", "schedule=constant", f"resume={stopped}")
    last = [read_checkpoint(one / "checkpoints" / "last.ckpt")["state_dict"]
            for one in (constant, resumed)]  # fmt: skip
    assert all(torch.equal(one, last[1][name]) for name, one in last[0].items())
    exported = AutoModelForCausalLM.from_pretrained(flashtrain.export(whole))
    assert exported.config.vocab_size == ROWS
    rows = exported.get_output_embeddings().weight[OLD:TOKENS]
    assert rows.shape == (TOKENS - OLD, 16)
    assert len(rows.unique(dim=0)) > 1  # of those that are learned, no longer the mean
    assert isinstance(flashtrain.generate(whole, "What is 2+3?"), str)


def test_adapters_which_would_leave_them_untrained_are_refused(fewer: Path) -> None:
    with pytest.raises(UserError, match=r"model\.adapter=lora would leave added rows untrained"):
        huggingface_model.build(settings(fewer, adapter="lora"), vocab_size=TOKENS, context=64)


def test_a_tokenizer_of_another_model_is_refused(fewer: Path) -> None:
    with pytest.raises(UserError, match=r"the tokenizer has 50,257 tokens.*only 250"):
        huggingface_model.build(settings(fewer), vocab_size=50257, context=64)
