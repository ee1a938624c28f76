"""What is done with Hugging Face models beside training them: asked, scored, gone on from
as transformers does it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_runs import TinyRuns
from transformers import AutoModelForCausalLM, AutoTokenizer

import flashtrain
from flashtrain.command import modes
from flashtrain.command.api import words_of
from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.integrations import transformers_decoder
from flashtrain.report.rows import read_result
from flashtrain.tasks.language.prepare import make_data
from flashtrain.training.hardware import detect_hardware


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found)


def test_a_run_of_adapters_and_a_model_that_no_run_has_trained_are_asked_rulers_tasks(
    lora: Path, base: Path, tmp_path: Path
) -> None:
    asked = {"lengths": [700], "tasks": ["niah_single_1"], "samples": 2}
    rows = flashtrain.evaluate(lora, mode="ruler", ruler=asked)["rows"]
    assert [(row["length"], row["samples"]) for row in rows] == [(700, 2)] * 2
    assert read_result(lora / "ruler" / "result.json").rows == rows
    found, before = [], set(base.iterdir())
    for longer in ({}, {"model.rope": "yarn", "model.rope_factor": 4}):
        found.append(
            flashtrain.evaluate(
                base, mode="ruler", ruler=asked, output=tmp_path, hardware="cpu", **longer
            )
        )
    assert set(base.iterdir()) == before
    ours, scaled = (one["rows"] for one in found)
    assert ours[0]["prompts"] == scaled[0]["prompts"] == rows[0]["prompts"]
    command = read_result(tmp_path / base.name / "ruler-2" / "result.json").command
    assert {f"model.path={base}", "model.rope=yarn", "model.rope_factor=4.0"} < {*command.split()}
    written = [
        (tmp_path / base.name / name / "answers.jsonl").read_text() for name in ("ruler", "ruler-2")
    ]
    assert written[0] != written[1]  # YaRN has changed what the model reads


def test_a_decoder_that_has_no_weights_yet_is_given_them_to_generate(base: Path) -> None:
    theirs, ids = AutoModelForCausalLM.from_pretrained(base), torch.arange(60, 70)[None]
    wanted = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(
        flashtrain.generate(transformers_decoder(str(base)), ids, 9, temperature=0), wanted
    )


def their_loss(folder: Path, settings) -> float:
    """transformers' own mean loss over the labels that these settings hold out, each document
    or row read by itself."""
    data = make_data(settings, detect_hardware("cpu"))
    data.setup()
    model, total, count = AutoModelForCausalLM.from_pretrained(folder), 0.0, 0
    for batch in data.val_dataloader():
        for tokens, labels, positions in zip(
            batch["tokens"], batch["labels"], batch["positions"], strict=True
        ):
            begins = (
                positions.eq(0).nonzero().flatten().tolist()
                if settings.applied_mask.documents
                else [0]
            )
            for begin, end in pairwise([*begins, len(tokens)]):
                wanted = labels[None, begin:end]
                if number := int((wanted != -100).sum()):
                    with torch.no_grad():
                        loss = model(
                            tokens[None, begin:end], labels=wanted, shift_labels=wanted
                        ).loss
                    total, count = total + loss.item() * number, count + number
    return total / count


def held_out(folder: Path, source: str) -> dict[str, Any]:
    """Settings of a small text, or of the conversations beside the model, of
    which much is held out."""
    path = folder.parent / ("chats.jsonl" if source == "chat" else "texts.jsonl")
    if source == "files":
        texts = [
            {"text": "The quick brown fox jumps over the lazy dog. " * (1 + number % 9)}
            for number in range(30)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    data = {
        "source": source,
        "path": str(path),
        "cache_dir": str(folder.parent),
        "validation_fraction": 0.4,
    }
    return {"data": data, "hardware": "cpu"}


@pytest.mark.parametrize(
    ("recipe", "source", "apart"),
    [("hf", "files", False), ("hf", "files", True), ("sft", "chat", True)],
)
def test_a_model_that_no_run_has_trained_has_transformers_own_loss(
    base: Path, recipe: str, source: str, apart: bool
) -> None:
    words = {"recipe": recipe, "context": 96, **held_out(base, source), "data.document_mask": apart}
    found = flashtrain.evaluate(base, **words)["validation_loss"]
    settings = settings_of(["mode=evaluate", f"model.path={base}", *words_of(words)])
    assert found == pytest.approx(their_loss(base, settings), abs=1e-5)


def test_weights_are_scored_and_written_with_by_our_own_decoders(base: Path, capsys) -> None:
    words = ["recipe=gpt2", f"weights={base}", f"data.tokenizer={base}"]
    settings = settings_of(["mode=evaluate", *words, *words_of(held_out(base, "files"))])
    assert settings.context == 256  # the model's, and not the recipe's
    assert modes.of_checkpoint(settings)["validation_loss"] == pytest.approx(
        their_loss(base, settings), abs=1e-5
    )
    how = [
        "mode=generate",
        "hardware=cpu",
        "prompt=The quick",
        "generate.temperature=0",
        "generate.max_new_tokens=9",
    ]
    assert modes.run_mode(settings_of([*words, *how])) == 0
    ours = capsys.readouterr().out
    assert modes.run_mode(settings_of([f"model.path={base}", *how])) == 0
    assert capsys.readouterr().out == ours
    assert ours.startswith("The quick")


def test_a_mode_without_any_model_names_the_settings_that_give_one() -> None:
    with pytest.raises(
        flashtrain.UserError, match=r"mode=evaluate needs checkpoint=.*model\.path="
    ):
        settings_of(["mode=evaluate", "recipe=hf"])
    with pytest.raises(flashtrain.UserError, match=r"mode=export needs checkpoint="):
        settings_of(["mode=export", "model.path=x"])


def test_a_training_of_all_weights_starts_from_adapters_that_are_merged(
    base: Path, words: list[str], lora: Path
) -> None:
    ids = torch.arange(60, 90)[None]
    trained = logits(flashtrain.load(lora).model, ids)
    assert not torch.allclose(
        trained, logits(AutoModelForCausalLM.from_pretrained(base), ids), atol=1e-2
    )
    ended = json.loads((lora / "summary.json").read_text())["validation_loss"]
    runs = TinyRuns(base.parent, words)
    for name, *how in (
        ("path", f"model.path={lora}"),
        ("weights", "model.path=null", f"weights={lora}"),
    ):
        status, folder = runs.run(
            name, "optimizer.learning_rate=1e-12", "model.adapter=null", "trainer.steps=1", *how
        )
        assert status == 0
        torch.testing.assert_close(
            logits(flashtrain.load(folder).model, ids), trained, rtol=0, atol=1e-4
        )
        assert json.loads((folder / "summary.json").read_text())[
            "validation_loss"
        ] == pytest.approx(ended, abs=1e-5)
    (exported,) = lora.glob("export*")  # made once
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(exported), ids), trained, rtol=0, atol=1e-4
    )
    (lora / "checkpoints" / "best.ckpt").touch()  # as one that was written since
    merged = settings_of(["mode=generate", f"model.path={lora}", "model.adapter=null"])
    assert merged.model.path == str(lora / "export-exact-2")


def test_a_plan_from_a_run_writes_nothing(words: list[str], lora: Path) -> None:
    before = set(lora.iterdir())
    planned = [word for word in words if not word.startswith(("recipe", "model.path", "logger"))]
    settings = {
        key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in planned)
    }
    assert "parameters" in flashtrain.plan("sft", **settings, weights=lora)
    assert set(lora.iterdir()) == before


MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 1+2, and why?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 2+2?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize("row", [{"messages": MESSAGES}, {"messages": MESSAGES, "tools": TOOLS}])
def test_a_conversation_is_answered_as_transformers_does(
    base: Path, row: dict, tmp_path: Path, capsys
) -> None:
    tokenizer, model = (
        AutoTokenizer.from_pretrained(base),
        AutoModelForCausalLM.from_pretrained(base),
    )
    options = {
        "tokenize": True,
        "return_tensors": "pt",
        "return_dict": True,
        "add_generation_prompt": True,
    }
    shown = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), **options)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    written = model.generate(
        **shown, max_new_tokens=20, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    wanted = tokenizer.decode(written[0, shown["input_ids"].shape[1] :], skip_special_tokens=True)
    assert flashtrain.generate(base, row, 20, temperature=0, hardware="cpu") == wanted
    (tmp_path / "talk.json").write_text(json.dumps(row if "tools" in row else row["messages"]))
    for prompt in (tmp_path / "talk.json", json.dumps(row)):
        how = [
            f"prompt={prompt}",
            "generate.temperature=0",
            "generate.max_new_tokens=20",
            "hardware=cpu",
        ]
        assert (
            modes.run_mode(settings_of(plain_words(["mode=generate", f"model.path={base}", *how])))
            == 0
        )
        assert capsys.readouterr().out == wanted + "\n"


def test_a_prompt_is_a_text_unless_it_is_a_conversation(base: Path, tmp_path: Path) -> None:
    for text in ("[1, 2]", "{x", '{"a": 1}', "see the file config.json"):
        assert flashtrain.generate(base, text, 2, hardware="cpu").startswith(text)
    with pytest.raises(FileNotFoundError, match=r"talk\.json"):
        flashtrain.generate(base, str(tmp_path / "talk.json"), 2, hardware="cpu")
    asked = "What is 2+2?"
    as_a_user = flashtrain.generate(base, asked, 9, recipe="sft", hardware="cpu")
    assert as_a_user == flashtrain.generate(
        base, [{"role": "user", "content": asked}], 9, hardware="cpu"
    )
