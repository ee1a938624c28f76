"""mode=evaluate scores all of a given text, counts it, and calls held-out what the run
was not trained on alone."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_folders import write_sums
from transformers import AutoModelForCausalLM

import flashtrain
from flashtrain.command import modes
from flashtrain.command.request import settings_of
from flashtrain.data.tokenizers import huggingface_tokenizer
from flashtrain.folders.run_folder import write_config
from flashtrain.tasks.held_out import why_not_held_out

TEXTS = [
    "The river runs to the sea.",
    "Nothing else happens here, and nobody minds it.",
    "An end ü😀.",
]


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Conversations that no run was trained on."""
    return write_sums(tmp_path / "others.jsonl", product([9], range(100, 120)))


def evaluated(caplog, *words: str) -> tuple[dict[str, Any], str]:
    caplog.clear()
    with caplog.at_level("INFO"):
        found = modes.of_checkpoint(settings_of(["mode=evaluate", *words]))
    return found, next(line for line in caplog.messages if " loss " in line)


@pytest.mark.parametrize("context", [16, 256])  # windows and a rest, and less than a window
def test_a_text_is_scored_to_its_last_token(
    base: Path, tmp_path: Path, caplog, context: int
) -> None:
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    tokenizer = huggingface_tokenizer(base)
    ids = [one for text in TEXTS for one in [*tokenizer.encode(text), tokenizer.end_of_text]]
    model, total = AutoModelForCausalLM.from_pretrained(base), 0.0
    for begin in range(0, len(ids) - 1, context):
        window = torch.tensor([ids[begin : begin + context + 1]])
        with torch.no_grad():
            logits = model(window[:, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    words = ["recipe=hf", "hardware=cpu", f"model.path={base}", "data=files", f"context={context}",
             f"data.path={tmp_path / 'texts.jsonl'}", f"data.cache_dir={tmp_path}"]  # fmt: skip
    found, line = evaluated(caplog, *words)
    assert found["validation_loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert (found["documents"], found["tokens"]) == (len(TEXTS), len(ids))
    assert f"3 documents, {len(ids)} tokens" in line
    # The first token is not predicted; ends of texts are, and have no bytes.
    size = len("".join(TEXTS).encode()) - len(tokenizer.decode(ids[:1]))
    assert found["bits_per_byte"] == pytest.approx(total / size / math.log(2), rel=1e-5)
    assert f"{found['bits_per_byte']:.4f} bits a byte ({size} bytes of text are predicted)" in line


def test_what_a_run_was_trained_on_is_not_called_held_out(
    base: Path, lora: Path, tmp_path: Path, caplog
) -> None:
    copy = shutil.copy(base.parent / "chats.jsonl", tmp_path / "copy.jsonl")
    for path in (base.parent / "chats.jsonl", copy):
        found, line = evaluated(caplog, f"checkpoint={lora}", f"data.path={path}")
        assert (found["conversations"], found["held_out"]) == (64, False)
        assert "held-out" not in line
        assert "trained on" in line
        assert "64 conversations" in line


def test_other_conversations_are_held_out_and_all_scored(lora: Path, others: Path, caplog) -> None:
    for setting in ("data.path", "data.validation_path"):
        found, line = evaluated(caplog, f"checkpoint={lora}", f"{setting}={others}")
        assert (found["conversations"], found["held_out"]) == (20, True)
        assert "held-out loss" in line
    own, line = evaluated(caplog, f"checkpoint={lora}")  # what the run held out itself
    assert (own["conversations"], own["held_out"]) == (1, True)
    assert "held-out loss" in line
    assert flashtrain.evaluate(lora, data={"path": str(others)})["conversations"] == 20


def test_a_larger_share_than_was_held_out_is_not_called_so(lora: Path, caplog) -> None:
    found, line = evaluated(caplog, f"checkpoint={lora}", "data.validation_fraction=0.5")
    assert (found["conversations"], found["held_out"]) == (32, False)
    assert "held-out" not in line


def test_a_folder_with_named_splits_is_scored_on_its_validation(
    base: Path, lora: Path, tmp_path: Path, caplog
) -> None:
    shutil.copy(base.parent / "chats.jsonl", tmp_path / "train.jsonl")
    write_sums(tmp_path / "validation.jsonl", product([9], range(200, 207)))
    found, _ = evaluated(caplog, f"checkpoint={lora}", f"data.path={tmp_path}")
    assert (found["conversations"], found["held_out"]) == (7, True)


@pytest.mark.parametrize(
    ("words", "held_out"),
    [
        (["context=32"], True),
        (["context=64"], False),
        (["context=16", "data.split_context=32"], True),
    ],
)
def test_texts_are_held_out_where_the_longer_of_context_and_split_context_is_the_runs(
    tmp_path: Path, words: list[str], held_out: bool
) -> None:
    """Documents are drawn for samples of that length, whichever of the two settings gives it."""
    (tmp_path / "t.txt").write_text("a text. " * 200)
    common = [
        "recipe=gpt2",
        "data=files",
        f"data.path={tmp_path / 't.txt'}",
        "data.tokenizer=bytes",
    ]
    write_config(asdict(settings_of([*common, "context=16", "data.split_context=32"])), tmp_path)
    reason = why_not_held_out(settings_of([*common, *words]), tmp_path)
    assert (reason is None) == held_out, reason
