"""What is done with Hugging Face models beside training them: asked, scored, gone on from as transformers does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_folders import CHATML, save_tokenizer_folder
from tiny_runs import TinyRuns
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import flashtrain
from flashtrain.integrations import transformers_decoder
from flashtrain.report import read_result
from flashtrain_recipes.long_context.passkey_run import ANSWER, SPARE_TOKENS, make_prompt

SMALL = ["hardware=cpu", "logger=none", "trainer.steps=2", "trainer.tokens_per_step=768", "generate.tokens=4"]
LARGE = "optimizer.learning_rate=0.01"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Llama of random weights that are far from 0, with a ChatML tokenizer."""
    folder = save_tokenizer_folder(tmp_path_factory.mktemp("base") / "llama", CHATML)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=272, max_position_embeddings=256, initializer_range=0.5))
    model.save_pretrained(folder)
    rows = [
        {"messages": [{"role": "user", "content": f"What is {a}+{b}?"}, {"role": "assistant", "content": f"{a + b}"}]}
        for a in range(8)
        for b in range(8)
    ]
    (folder.parent / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def words(base: Path) -> list[str]:
    folder = base.parent
    return ["recipe=sft", *SMALL, f"model.path={base}", f"data.path={folder / 'chats.jsonl'}", "context=96", LARGE,
            f"data.cache_dir={folder}", f"output={folder}"]  # fmt: skip


@pytest.fixture(scope="module")
def lora(base: Path, words: list[str]) -> Path:
    """A run of adapters that has changed the model."""
    status, folder = TinyRuns(base.parent, words).run("lora", "model.adapter=lora")
    assert status == 0
    return folder


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found)


def test_a_run_of_a_transformers_model_is_asked_for_passkeys(lora: Path) -> None:
    rows = flashtrain.evaluate(lora, mode="passkey", passkey={"lengths": [400], "depths": [0.5], "trials": 1})["rows"]
    assert [(row["length"], row["trials"]) for row in rows] == [(400, 1)]
    assert read_result(lora / "passkey" / "result.json").rows == rows


def test_passkey_answers_are_transformers_own_greedy_ones(base: Path) -> None:
    from flashtrain_recipes.long_context.passkey_run import greedy

    tokenizer = flashtrain.data.tokenizers.huggingface_tokenizer(base)
    prompt = make_prompt(tokenizer, "48213", length=400, depth=0.5)
    assert prompt.answer == len(tokenizer.encode(ANSWER.format(key="48213"))) + SPARE_TOKENS
    ids = torch.tensor([prompt.tokens])
    model = transformers_decoder(str(base))
    model.materialise(torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(base)
    wanted = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(greedy(model.eval(), ids, 9), wanted[:, -9:])


def test_a_decoder_that_has_no_weights_yet_is_given_them_to_generate(base: Path) -> None:
    theirs, ids = AutoModelForCausalLM.from_pretrained(base), torch.arange(60, 70)[None]
    wanted = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(flashtrain.generate(transformers_decoder(str(base)), ids, 9, temperature=0), wanted)
