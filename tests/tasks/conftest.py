"""A tiny Llama with conversations to train it on, and a run of adapters on them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from chat_folders import CHATML, save_tokenizer_folder, write_sums
from tiny_runs import TinyRuns
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = [
    "hardware=cpu",
    "logger=none",
    "trainer.steps=2",
    "trainer.tokens_per_step=768",
    "generate.max_new_tokens=4",
]
LARGE = "optimizer.learning_rate=0.01"


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A Llama of random weights that are far from 0, with a ChatML tokenizer."""
    folder = save_tokenizer_folder(tmp_path_factory.mktemp("base") / "llama", CHATML)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    shape |= {"rms_norm_eps": 1e-5, "initializer_range": 0.5}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=265, max_position_embeddings=256))
    model.save_pretrained(folder)
    write_sums(folder.parent / "chats.jsonl", product(range(8), range(8)))
    return folder


@pytest.fixture(scope="session")
def words(base: Path) -> list[str]:
    folder = base.parent
    return ["recipe=sft", *SMALL, f"model.path={base}", f"data.path={folder / 'chats.jsonl'}",
            "context=96", LARGE,
            f"data.cache_dir={folder}", f"output={folder}"]  # fmt: skip


@pytest.fixture(scope="session")
def lora(base: Path, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters that has changed the model."""
    folder = tmp_path_factory.mktemp("adapters")  # of this process of tests, as its base is
    return TinyRuns(base.parent, words).finished(folder, "model.adapter=lora")
