"""mode=evaluate scores all of a given text, counts it, and calls held-out what the run was not trained on alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_folders import CHATML, save_tokenizer_folder
from tiny_runs import TinyRuns
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import flashtrain
from flashtrain.command import modes
from flashtrain.command.given import settings_of
from flashtrain.data.tokenizers import huggingface_tokenizer

TEXTS = ["The river runs to the sea.", "Nothing else happens here, and nobody minds it.", "An end."]


def write_chats(path: Path, numbers: range) -> Path:
    rows = [
        [{"role": "user", "content": f"What is {n}+{n}?"}, {"role": "assistant", "content": f"{n + n}"}]
        for n in numbers
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of random weights with a ChatML tokenizer in model/, and what it is trained and scored on."""
    folder = tmp_path_factory.mktemp("scored")
    save_tokenizer_folder(folder / "model", CHATML)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**shape, vocab_size=265, max_position_embeddings=256, initializer_range=0.5)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_chats(folder / "chats.jsonl", range(64))
    write_chats(folder / "others.jsonl", range(100, 120))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    words = ["recipe=sft", "hardware=cpu", "logger=none", "trainer.steps=2", "trainer.tokens_per_step=768",
             "generate.tokens=4", f"model.path={folder / 'model'}", f"data.path={folder / 'chats.jsonl'}", "context=96",
             "schedule=constant", f"data.cache_dir={folder}", f"output={folder}"]  # fmt: skip
    status, made = TinyRuns(folder, words).run("run")
    assert status == 0
    return made


def evaluated(caplog, *words: str) -> tuple[dict[str, Any], str]:
    caplog.clear()
    with caplog.at_level("INFO"):
        found = modes.of_checkpoint(settings_of(["mode=evaluate", *words]))
    return found, next(line for line in caplog.messages if " loss " in line)


@pytest.mark.parametrize("context", [16, 256])  # windows and a rest, and less than a window
def test_a_text_is_scored_to_its_last_token(folder: Path, caplog, context: int) -> None:
    tokenizer = huggingface_tokenizer(folder / "model")
    ids = [one for text in TEXTS for one in [*tokenizer.encode(text), tokenizer.end_of_text]]
    model, total = AutoModelForCausalLM.from_pretrained(folder / "model"), 0.0
    for begin in range(0, len(ids) - 1, context):
        window = torch.tensor([ids[begin : begin + context + 1]])
        with torch.no_grad():
            logits = model(window[:, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    words = ["recipe=hf", "hardware=cpu", f"model.path={folder / 'model'}", "data=files", f"context={context}",
             f"data.path={folder / 'texts.jsonl'}", f"data.cache_dir={folder}"]  # fmt: skip
    found, line = evaluated(caplog, *words)
    assert found["validation_loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert (found["documents"], found["tokens"]) == (len(TEXTS), len(ids))
    assert f"3 documents, {len(ids)} tokens" in line


def test_what_a_run_was_trained_on_is_not_called_held_out(folder: Path, run: Path, tmp_path: Path, caplog) -> None:
    copy = shutil.copy(folder / "chats.jsonl", tmp_path / "copy.jsonl")
    for path in (folder / "chats.jsonl", copy):
        found, line = evaluated(caplog, f"checkpoint={run}", f"data.path={path}")
        assert (found["conversations"], found["held_out"]) == (64, False)
        assert "held-out" not in line
        assert "trained on" in line
        assert "64 conversations" in line


def test_other_conversations_are_held_out_and_all_scored(folder: Path, run: Path, caplog) -> None:
    for setting in ("data.path", "data.validation_path"):
        found, line = evaluated(caplog, f"checkpoint={run}", f"{setting}={folder / 'others.jsonl'}")
        assert (found["conversations"], found["held_out"]) == (20, True)
        assert "held-out loss" in line
    own, line = evaluated(caplog, f"checkpoint={run}")  # what the run held out itself
    assert (own["conversations"], own["held_out"]) == (1, True)
    assert "held-out loss" in line
    assert flashtrain.evaluate(run, data={"path": str(folder / "others.jsonl")})["conversations"] == 20


def test_a_larger_share_than_was_held_out_is_not_called_so(run: Path, caplog) -> None:
    found, line = evaluated(caplog, f"checkpoint={run}", "data.validation_fraction=0.5")
    assert (found["conversations"], found["held_out"]) == (32, False)
    assert "held-out" not in line


def test_a_folder_with_named_splits_is_scored_on_its_validation(
    folder: Path, run: Path, tmp_path: Path, caplog
) -> None:
    shutil.copy(folder / "chats.jsonl", tmp_path / "train.jsonl")
    write_chats(tmp_path / "validation.jsonl", range(200, 207))
    found, _ = evaluated(caplog, f"checkpoint={run}", f"data.path={tmp_path}")
    assert (found["conversations"], found["held_out"]) == (7, True)
