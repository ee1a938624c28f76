"""A tiny Llama whose tokenizer puts a begin of text: scored and prompted as
transformers does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from chat_folders import save_tokenizer_folder
from tiny_runs import TINY, TinyRuns

import flashtrain

TEXT = "hello, there!"
HELD_OUT = 8  # of 40 documents, all alike


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("begins")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    save_tokenizer_folder(folder / "model", None, begins=True)
    end = transformers.AutoTokenizer.from_pretrained(folder / "model").eos_token_id
    config = transformers.LlamaConfig(
        **sizes, vocab_size=320, max_position_embeddings=64, initializer_range=0.3, eos_token_id=end
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(TEXT)
    left_out = ("recipe=", "model.size=", "model.vocab_rows=", "data.tokenizer=")
    words = [word for word in TINY if not word.startswith(left_out)]
    places = [
        f"data.path={folder / 'texts'}",
        f"data.cache_dir={folder / 'cache'}",
        f"model.path={folder / 'model'}",
    ]
    return TinyRuns(
        folder, ["recipe=hf", *words, *places, f"output={folder}", "trainer.compile=false"]
    )


@pytest.fixture(scope="module")
def run(runs: TinyRuns) -> Path:
    status, folder = runs.run("hf/run", "trainer.steps=3")
    assert status == 0
    return folder


@pytest.fixture(scope="module")
def theirs(run: Path):
    """(model, tokenizer) of the run's export by transformers."""
    folder = flashtrain.export(run)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def loss(theirs, *, begins: bool) -> float:
    """Of the held-out documents, one after another, in rows of 32 tokens."""
    model, tokenizer = theirs
    ids = [*tokenizer(TEXT, add_special_tokens=begins).input_ids, tokenizer.eos_token_id] * HELD_OUT
    rows = torch.tensor(ids).unfold(0, 33, 32)
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def written(theirs, prompt: str, *, begins: bool) -> str:
    model, tokenizer = theirs
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=begins).input_ids])
    answer = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    return prompt + tokenizer.decode(answer)


def test_the_held_out_loss_is_transformers_of_what_its_tokenizer_gives(run, theirs):
    found = flashtrain.evaluate(run, hardware="cpu")["validation_loss"]
    assert found == pytest.approx(loss(theirs, begins=True), abs=1e-5)
    off = flashtrain.evaluate(run, hardware="cpu", **{"data.begin_of_text": False})[
        "validation_loss"
    ]
    assert off == pytest.approx(loss(theirs, begins=False), abs=1e-5)
    assert abs(off - found) > 1e-2


def test_a_prompt_begins_as_a_document_does_and_is_given_back_as_it_was(run, theirs):
    text = flashtrain.generate(run, "hello", temperature=0.0, hardware="cpu")
    assert text == written(theirs, "hello", begins=True) != written(theirs, "hello", begins=False)
