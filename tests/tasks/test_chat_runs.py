"""Runs on conversations: trained, resumed, evaluated, asked, and what is refused
before anything is built."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from chat_folders import CHATML, save_tokenizer_folder, write_sums
from forked_commands import run
from jobs import run_job
from tiny_runs import TINY, TinyRuns, made_once, run_mode

from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import SETTINGS
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine, as_value
from flashtrain.spec import task_of
from flashtrain.tasks.language.prepare import make_data
from flashtrain.training.hardware import detect_hardware
from flashtrain.training.metrics_file import METRICS, read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("chats")
    save_tokenizer_folder(folder / "model", CHATML, words="What is the sum? user assistant " * 9)
    write_sums(folder / "chats.jsonl", product(range(8), range(8)))
    without = [
        word
        for word in TINY
        if not word.startswith(("data=", "data.tokenizer=", "context=", "trainer.tokens"))
    ]
    words = [
        "data=chat",
        f"data.tokenizer={folder / 'model'}",
        "context=96",
        "trainer.tokens_per_step=768",
    ]
    return TinyRuns(folder,
                             [*without, *words, f"data.path={folder / 'chats.jsonl'}",
                                 f"data.cache_dir={folder}",
                             f"output={folder}"])  # fmt: skip


@pytest.fixture(scope="module")
def finished(runs, tmp_path_factory):
    return made_once(tmp_path_factory, "chat", runs.finished)


def test_a_run_learns_what_the_assistant_says(finished, capsys):
    row = json.loads((finished / "summary.json").read_text())
    assert row["status"] == "finished"
    assert row["train_loss"] < row["train_loss_first"]
    assert row["validation_loss"] is not None
    assert row["epochs"] > 1


def test_its_checkpoint_is_evaluated_on_the_held_out_answers(finished, caplog):
    with caplog.at_level("INFO"):
        assert run_mode("mode=evaluate", f"checkpoint={finished}/checkpoints/last.ckpt") == 0
    row = json.loads((finished / "summary.json").read_text())
    assert f"held-out loss {row['validation_loss']:.4f}" in caplog.text
    with pytest.raises(
        UserError, match=r"nothing is held out to evaluate on\. Raise data\.validation_fraction"
    ):
        run_mode("mode=evaluate", f"checkpoint={finished}", "data.validation_fraction=0")


def test_it_answers_a_prompt_as_a_user_gives_it(finished, capsys):
    assert run_mode("mode=generate", f"checkpoint={finished}", 'prompt="What is 2+3?"') == 0
    out = capsys.readouterr().out
    assert "2+3" not in out  # the answer alone, without the template's frame
    assert "<|im_" not in out


def test_a_typed_conversation_is_answered_as_a_given_one_while_it_is_written(
    finished, capsys, monkeypatch
):
    words = ("mode=generate", f"checkpoint={finished}", "generate.temperature=9",
             "generate.max_new_tokens=20")  # fmt: skip

    def answer(*messages: str) -> str:
        roles = ("user", "assistant", "user")
        given = [{"role": one, "content": text} for one, text in zip(roles, messages)]  # noqa: B905
        capsys.readouterr()
        run_mode(*words, f"prompt={as_value(json.dumps(given))}")
        return capsys.readouterr().out

    first = answer("What is 2+3?")
    second = answer("What is 2+3?", first.removesuffix("\n"), "And 1+1?")
    pieces, write = [], sys.stdout.write
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2+3?\nAnd 1+1?\n\nnever read\n"))
    monkeypatch.setattr(sys.stdout, "write", lambda text: pieces.append(text) or write(text))
    assert run_mode(*words, "prompt=-") == 0
    assert "".join(pieces) == first + second
    assert len([one for one in pieces if one.strip()]) > 2  # not in one piece each


def test_its_export_has_the_chat_template_and_ends_where_answers_do(finished):
    from transformers import AutoTokenizer, GenerationConfig

    assert run_mode("mode=export", f"checkpoint={finished}") == 0
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    assert tokenizer.chat_template == CHATML
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    assert GenerationConfig.from_pretrained(finished / "export").eos_token_id == ends


def test_what_would_be_trained_is_planned(runs):
    words = runs.settings_words("mode=plan")
    settings, hardware = adapt_to_machine(compose_settings(words), CommandLine(words))
    assert "chats.jsonl, about " in task_of(settings).plan(settings, hardware)


@pytest.mark.integration
def test_a_run_begun_before_answers_were_checked_resumes_on_its_own_labels(runs, tmp_path):
    """Its config.yaml lacks the setting, and its checkpoint has none; losses
    are repeated bit for bit."""
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5", "weight": 0},
            {"role": "user", "content": "no"},
            {"role": "assistant", "content": "4", "thinking": "hm"}]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 24)
    words = [
        f"data.path={tmp_path / 'chats.jsonl'}",
        "context=192",
        "schedule=constant",
        f"output={tmp_path}",
    ]
    older = replace(
        runs, folder=tmp_path, words=runs.settings_words(*words, "data.check_answers=false")
    )
    (_, whole), (_, halved) = (
        older.run("whole", "trainer.steps=6"),
        older.run("halved", "trainer.steps=3"),
    )
    config = (halved / "config.yaml").read_text()
    (halved / "config.yaml").write_text(config.replace("  check_answers: false\n", ""))
    last = halved / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    del saved[SETTINGS]  # which 00a7c4ca stores none of
    torch.save(saved, last)
    settings = settings_from_checkpoint(
        [f"resume={halved}", "trainer.steps=6", f"data.cache_dir={tmp_path / 'new'}"]
    )
    assert run_job(settings, halved, overrides=[], started=time.time()) == 0
    assert "check_answers" in config
    assert logged_losses(halved)[-4:] == logged_losses(whole)[-4:]
    _, anew = older.run("anew", "trainer.steps=1", "data.check_answers=true")
    assert logged_losses(anew)[0] != logged_losses(whole)[0]  # "5" is not learned


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe=gpt2 data=chat data.path=x data.tokenizer=bytes", "data.tokenizer=FOLDER"),
        ("recipe=sft data.train_on=user", r"unknown data\.train_on 'user'"),
        ("recipe=sft data.skip_broken=2", r"data\.skip_broken=2"),
        ("recipe=bert data=chat data.path=x", "data=chat trains language models"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(words, message):
    with pytest.raises(UserError, match=message):
        compose_settings(words.split())


@pytest.mark.parametrize(
    ("word", "message"),
    [("data.path=null", r"data\.path="), ("data.path=nothing.jsonl", "nothing")],
)
def test_conversations_must_be_somewhere(runs, word, message):
    with pytest.raises(UserError, match=message):
        make_data(compose_settings(runs.settings_words(word)), detect_hardware("cpu")).setup()


@pytest.mark.longest
@pytest.mark.slow  # processes of their own
@pytest.mark.parametrize(
    "devices",
    [
        "trainer.devices=2",
        "trainer.devices=2 context_parallel=2",
        "trainer.devices=4 context_parallel=2",
    ],
)
def test_several_devices_train_as_one_does(runs, finished, devices, tmp_path):
    """Their losses are those of one, each step's over the labels of all, and so are the
    losses on what is held out."""
    words = runs.settings_words(
        *devices.split(), "trainer.micro_batch=1", f"hydra.run.dir={tmp_path / 'run'}"
    )
    run(words, tmp_path / "printed", ranks=int(devices.split()[0][-1]))
    one, several = (logged_losses(folder) for folder in (finished, tmp_path / "run"))
    assert several == pytest.approx(one, rel=1e-4)


def logged_losses(folder: Path) -> list[float]:
    rows = read_metrics(folder / METRICS)
    return [row[name] for name in ("train_loss", "validation_loss") for row in rows if name in row]


def test_what_is_written_ends_with_the_turn_that_was_trained_on(tmp_path, capsys):
    """Of a base model whose own files end a text alone: here, and with transformers'
    generate on the export."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    folder = save_tokenizer_folder(tmp_path / "llama", CHATML)
    text_end, turn_end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(
        ["<|end|>", "<|im_end|>"]
    )
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(**shape, vocab_size=272, max_position_embeddings=64)
    ).save_pretrained(folder)
    GenerationConfig(eos_token_id=[text_end, 270], _from_model_config=True).save_pretrained(folder)
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    words = ["recipe=sft", "hardware=cpu", "logger=none", "context=64",
             "trainer.tokens_per_step=128",
             "trainer.steps=40", "trainer.micro_batch=2", "optimizer.learning_rate=0.01",
             "prompt=Hi",
             "generate.temperature=0", "generate.max_new_tokens=20", f"model.path={folder}",
             f"data.path={tmp_path / 'chats.jsonl'}", f"data.cache_dir={tmp_path}"]  # fmt: skip
    status, finished = TinyRuns(tmp_path, [*words, f"output={tmp_path}"]).run("sft")
    assert status == 0
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert run_mode("mode=generate", f"checkpoint={finished}", "prompt=Hi") == 0
    assert capsys.readouterr().out.splitlines()[-1].removesuffix("<|im_end|>") == "yes"
    assert run_mode("mode=export", f"checkpoint={finished}") == 0
    model, tokenizer = (
        one.from_pretrained(finished / "export") for one in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.generation_config.eos_token_id == [text_end, 270, turn_end]
    assert not model.generation_config._from_model_config
    asked = tokenizer.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, return_tensors="pt"
    )
    written = model.generate(**asked, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(written[0]) == expected
