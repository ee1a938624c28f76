"""The same packed rows trained by TRL's trainer: its losses are those of the run at the same
steps."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
from chat_folders import CHATML, save_tokenizer_folder, write_sums
from jobs import run_job

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_summary
from flashtrain.report.rows import read_result
from flashtrain_recipes.trl_training import main

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("attention", "more", "memory"),
    [
        ("sdpa", ("memory.loss_chunk=64",), "none"),
        ("flash_attention_2", (), "none"),
        (
            "sdpa",
            ("model.adapter=lora", "memory.activation_checkpointing=full"),
            "gradient checkpointing",
        ),
    ],
)
def test_a_run_and_trls_trainer_have_the_same_losses(
    attention, more, memory, tmp_path, monkeypatch
) -> None:
    """transformers' Trainer stands in for the SFTTrainer that is derived from it: loss and
    gradients of packed rows, accumulation, clipping and schedule are theirs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    @dataclass
    class SFTConfig(TrainingArguments):
        max_length: int | None = None
        dataset_kwargs: dict | None = None

    apart = []  # whether flash attention would tell a micro-batch's documents apart

    class SFTTrainer(Trainer):
        def training_step(self, model, inputs, *given):
            positions = inputs["position_ids"]
            apart.append(bool(_is_packed_sequence(positions, len(positions))))
            return super().training_step(model, inputs, *given)

    trl = SimpleNamespace(SFTConfig=SFTConfig, SFTTrainer=SFTTrainer, __version__="1.2.3")
    monkeypatch.setitem(sys.modules, "trl", trl)
    set_attention = LlamaForCausalLM.set_attn_implementation
    monkeypatch.setattr(  # flash-attn needs a GPU
        LlamaForCausalLM, "set_attn_implementation", lambda model, _: set_attention(model, "sdpa")
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
        "recipe=sft", "hardware=cpu", "logger=none", "context=96",
        "trainer.steps=6", "trainer.tokens_per_step=384", "trainer.micro_batch=2",
        "trainer.log_every=4", "optimizer.learning_rate=1e-2", "generate.max_new_tokens=1",
        f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'chats.jsonl'}",
        f"data.cache_dir={tmp_path}", *more,
    ]  # fmt: skip
    run = tmp_path / "run"
    assert run_job(compose_settings(words), run, overrides=words, started=time.monotonic()) == 0
    main(str(run), attention)
    ours, theirs = read_result(run / "trl" / "result.json").rows
    assert theirs["train_loss_mean"] == pytest.approx(
        ours["train_loss_mean"], rel=1e-5 if memory == "none" else 1e-3
    )
    assert theirs["train_loss"] == pytest.approx(ours["train_loss"], rel=1e-2)
    assert (theirs["implementation"], theirs["memory"]) == (f"TRL 1.2.3, {attention}", memory)
    assert ours["memory"] == read_summary(run)["memory"]
    assert all(apart) == (attention != "sdpa")
    assert theirs["train_loss"] < 5.9
    assert theirs["tokens_per_second"] > 0
    summary = {**read_summary(run), "devices": 2}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    with pytest.raises(UserError, match="2 devices"):
        main(str(run), attention)
