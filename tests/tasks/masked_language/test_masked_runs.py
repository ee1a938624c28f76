"""Runs of recipe=bert: the summary row, resuming, a target accuracy, evaluating, exporting,
and mistakes in a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_runs import TinyRuns, last_weights

import flashtrain
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.command.modes import run_mode
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_summary
from flashtrain.integrations import save_bert
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.tasks.masked_language.prepare import make_bert
from flashtrain.tasks.masked_language.trained import read_bert, special_tokens, tokenizer_of
from flashtrain.training.hardware import detect_hardware

pytestmark = pytest.mark.integration  # whole runs


def test_the_row_reports_real_tokens_fill_and_accuracy(trained_bert) -> None:
    row = read_summary(trained_bert)
    assert (row["status"], row["model"], row["steps"], row["layout"]) == (
        "finished",
        "bert-tiny",
        4,
        "packed",
    )
    assert 0 < row["tokens"] <= 4 * 256
    assert 0.5 < row["fill"] <= 1
    assert 0 <= row["validation_accuracy"] <= 1
    assert row["tokens_per_second"] > row["rows_per_second"] > 0
    assert row["seconds_to_target"] is None
    assert not any(isinstance(value, dict | list) for value in row.values())


def test_padded_rows_of_the_same_samples_train_to_the_same_weights(
    bert_runs: TinyRuns, trained_bert, monkeypatch
) -> None:
    # They have a new shape in every batch: they are not compiled even where a
    # packed batch would be.
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    status, folder = bert_runs.run("padded", "masked.layout=padded", "trainer.compile=true")
    assert status == 0
    found = last_weights(folder)
    for name, value in last_weights(trained_bert).items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-3)


def test_a_target_accuracy_stops_the_run_and_is_timed(bert_runs: TinyRuns, capsys, caplog) -> None:
    status, folder = bert_runs.run(
        "target", "target_accuracy=0.0000001", "trainer.steps=40", "optimizer=lamb"
    )
    assert status == 0
    row = read_summary(folder)
    assert row["steps"] < 40
    assert row["seconds_to_target"] > 0
    assert row["optimizer"] == "lamb"


def test_it_is_loaded_and_scored_in_python(trained_bert) -> None:
    last = trained_bert / "checkpoints" / "last.ckpt"
    loaded = flashtrain.load(last)
    assert (loaded.checkpoint, loaded.settings.task) == (last, "masked_language_model")
    assert loaded.tokenizer is not None
    saved = last_weights(trained_bert)
    assert all(
        torch.equal(value, saved[f"model.{name}"])
        for name, value in loaded.model.state_dict().items()
    )
    row, scores = read_summary(trained_bert), flashtrain.evaluate(loaded)
    own = {
        name: pytest.approx(row[name], rel=1e-5)
        for name in ("validation_loss", "validation_accuracy")
    }
    assert scores == {**own, "held_out": True, "samples": scores["samples"]}
    with pytest.raises(UserError, match="cannot generate text: only language models can"):
        flashtrain.generate(loaded, "a text")


def test_an_export_is_read_by_transformers_and_by_us(trained_bert) -> None:
    transformers = pytest.importorskip("transformers")
    assert run_mode(settings_from_checkpoint(["mode=export", f"checkpoint={trained_bert}"])) == 0
    (folder,) = trained_bert.glob("export*")
    saved = read_bert(folder, compose_settings(["recipe=bert"]))
    ours = saved.model
    assert special_tokens(tokenizer_of(saved)).vocab_size == ours.config.vocab_size == 261
    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tokens)[..., :261], theirs(tokens).logits, atol=1e-4, rtol=1e-4
        )


def test_training_starts_from_such_weights(bert_runs: TinyRuns, trained_bert) -> None:
    status, folder = bert_runs.run("again", f"weights={trained_bert}", "trainer.steps=1")
    assert status == 0
    assert read_summary(folder)["train_loss_first"] < read_summary(trained_bert)["train_loss_first"]


def test_a_next_sentence_head_of_the_weights_is_left_out(tmp_path) -> None:
    config = BertConfig.of_size("tiny", vocab_size=261, context=64)
    bert = Bert(replace(config, pooler=True, next_sentence=True), "sdpa").eval()
    save_bert(bert, tmp_path)
    settings = compose_settings(
        ["recipe=bert", "context=64", "bert.dropout=0", f"weights={tmp_path}"]
    )
    model = make_bert(settings, detect_hardware("cpu"), 261).eval()
    assert not model.config.next_sentence
    tokens = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(model(tokens), bert(tokens))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("trainer.devices=3",),
            "must be a multiple of masked.token_budget=128 tokens on 3 devices. Use 384",
        ),
        (("masked.token_budget=32",), "masked.token_budget=32 must be at least 64"),
        (("context=2",), "context=2"),
        (("trainer.micro_batch=4",), "Use masked.token_budget"),
        (("trainer.strategy=fsdp", "optimizer=lamb"), "cannot train sharded weights"),
        (("masked.mlm_probability=0",), "masked.mlm_probability=0"),
        (("target_accuracy=2",), "target_accuracy=2.0"),
        (("recipe=gpt2", "target_accuracy=0.5"), "is a setting of task=masked_language_model"),
        (("weights=nowhere",), "weights=nowhere"),
    ],
)
def test_settings_that_cannot_work_are_one_line(bert_runs: TinyRuns, words, message) -> None:
    with pytest.raises(UserError, match=message):
        adapt_to_machine(
            compose_settings(bert_runs.settings_words(*words)), CommandLine(["hardware.demo=never"])
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bert.activation=cube",), "unknown activation 'cube'"),
        (
            ("context=65", "masked.token_budget=256", "weights=TRAINED"),
            "longer than the 64 positions",
        ),
        (("bert.size=base", "resume=TRAINED"), "embed"),
    ],
)
def test_so_are_those_that_show_when_the_model_is_built(
    bert_runs: TinyRuns, trained_bert, words, message
) -> None:
    words = [word.replace("TRAINED", str(trained_bert)) for word in words]
    status, folder = bert_runs.run(f"mistake-{abs(hash(message))}", *words)
    assert status == 2
    assert message in read_summary(folder)["error"]
