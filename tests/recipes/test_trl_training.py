"""The same packed rows trained by TRL's trainer: its losses are those of the run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
from chat_folders import CHATML, save_tokenizer_folder, write_sums
from jobs import run_job

from flashtrain.command.compose import compose_settings
from flashtrain.report.rows import read_result
from flashtrain_recipes.trl_training import main

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "adapter", [(), ("model.adapter=lora", "memory.activation_checkpointing=full")]
)
def test_a_run_and_trls_trainer_have_the_same_losses(adapter, tmp_path, monkeypatch) -> None:
    """transformers' Trainer stands in for the SFTTrainer that is derived from it: loss and
    gradients of packed rows, accumulation, clipping and schedule are theirs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    @dataclass
    class SFTConfig(TrainingArguments):
        max_length: int | None = None
        dataset_kwargs: dict | None = None

    monkeypatch.setitem(
        sys.modules, "trl", SimpleNamespace(SFTConfig=SFTConfig, SFTTrainer=Trainer)
    )
    save_tokenizer_folder(tmp_path / "model", CHATML, words="What is the sum? user assistant " * 9)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1,
        )
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    write_sums(tmp_path / "chats.jsonl", product(range(8), range(8)))
    words = [
        "recipe=sft", "hardware=cpu", "hardware.demo=never", "logger=none", "context=96",
        "trainer.steps=6", "trainer.tokens_per_step=384", "trainer.micro_batch=2",
        "trainer.log_every=1", "optimizer.learning_rate=1e-2", "generate.max_new_tokens=1",
        f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'chats.jsonl'}",
        f"data.cache_dir={tmp_path}", *adapter,
    ]  # fmt: skip
    run = tmp_path / "run"
    assert run_job(compose_settings(words), run, overrides=words, started=time.monotonic()) == 0
    main(str(run))
    ours, theirs = read_result(run / "trl" / "result.json").rows
    assert theirs["train_loss_mean"] == pytest.approx(
        ours["train_loss_mean"], rel=1e-3 if adapter else 1e-5
    )
    assert theirs["train_loss"] < 5.9
    assert theirs["tokens_per_second"] > 0
