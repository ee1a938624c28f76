"""Passkey retrieval: prompts of exact length, and what counts as an answer."""

from __future__ import annotations

import re

import pytest
from chat_folders import save_tokenizer_folder
from transformers import AutoTokenizer

from flashtrain.command import modes
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.tokenizers import ByteTokenizer, huggingface_tokenizer
from flashtrain.errors import UserError
from flashtrain.report.rows import read_result
from flashtrain_recipes.long_context.passkey_run import FILLER, HIDDEN, make_prompt, passkey_rows

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    texts = [FILLER * 3, HIDDEN.format(key="12345"), "What is the pass key? 90817 and 264 and 3"]
    return BPETokenizer.train(iter(texts * 5), 330)


def answers(write, tokenizer=BYTES):
    """A model that continues each prompt's text with what `write` makes of it."""

    def answer(prompt, count):
        written = tokenizer.encode(write(tokenizer.decode(prompt)))
        return (written + [tokenizer.end_of_text] * count)[:count]

    return answer


def copies(text: str) -> str:
    return " " + re.search(r"The pass key is (\d+)\.", text)[1] + ". "


def accuracy(write, tokenizer=BYTES, **changes) -> list[float]:
    asked = {"lengths": [400, 1000], "depths": [0.0, 0.5, 1.0], "trials": 4, "seed": 0, **changes}
    return [row["accuracy"] for row in passkey_rows(answers(write, tokenizer), tokenizer, **asked)]


@pytest.mark.parametrize("write", [copies, lambda text: copies(text).replace(".", " and")])
def test_a_model_that_copies_finds_every_key_at_every_length_and_depth(bpe, write) -> None:
    for tokenizer in (BYTES, bpe):
        assert accuracy(write, tokenizer) == [1.0] * 6


def test_a_prompt_begins_as_its_tokenizer_begins_texts_and_has_the_exact_length(tmp_path) -> None:
    tokenizer = huggingface_tokenizer(save_tokenizer_folder(tmp_path, begins=True))
    prompt = make_prompt(tokenizer, "12345", length=400, depth=0.5)
    assert prompt.tokens[:1] == AutoTokenizer.from_pretrained(tmp_path)("").input_ids
    assert len(prompt.tokens) + prompt.answer == 400


@pytest.mark.parametrize(
    "write",
    [
        lambda text: "",
        lambda text: " the river runs",
        lambda text: " 12345.",
        lambda text: copies(text)[:-3] + ".",  # the last digit is missing
        lambda text: copies(text).replace(".", "7"),  # a digit too many
        lambda text: " is" + copies(text),
    ],
)
def test_a_model_that_does_not_finds_none(write) -> None:
    assert accuracy(write) == [0.0] * 6


@pytest.mark.parametrize("length", [400, 777])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_and_its_answer_are_exactly_as_long_as_asked(bpe, length, depth) -> None:
    for tokenizer in (BYTES, bpe):
        prompt = make_prompt(tokenizer, "48213", length=length, depth=depth)
        assert len(prompt.tokens) + prompt.answer == length


def test_depth_is_the_share_of_filler_before_the_key() -> None:
    places = {}
    for depth in (0.0, 0.25, 1.0):
        text = BYTES.decode(make_prompt(BYTES, "48213", length=5000, depth=depth).tokens)
        assert text.count("48213") == 2
        assert text.endswith("What is the pass key? The pass key is")
        places[depth] = text.index("The pass key is 48213")
    room = places[1.0] - places[0.0]
    assert places[0.25] - places[0.0] == pytest.approx(room / 4, abs=1)


def test_keys_differ_and_are_the_same_for_the_same_seed() -> None:
    def keys(seed):
        seen = []
        accuracy(lambda text: seen.append(copies(text)) or "", seed=seed)
        return seen

    assert len(set(keys(0))) > 20
    assert keys(0) == keys(0) != keys(1)


def test_a_length_without_room_is_refused_with_the_shortest_possible() -> None:
    with pytest.raises(
        UserError, match=r"100 tokens are too few for the prompt: choose (\d+) or more"
    ) as caught:
        accuracy(copies, lengths=[100])
    shortest = int(re.search(r"choose (\d+)", str(caught.value))[1])
    assert accuracy(copies, lengths=[shortest]) == [1.0] * 3


def run_mode(*words: str) -> int:
    settings = settings_from_checkpoint(["mode=passkey", *words])
    assert settings is not None
    return modes.run_mode(settings)


def test_the_mode_leaves_a_table_and_rows_for_a_model_that_knows_nothing(trained, capsys) -> None:
    words = (
        f"checkpoint={trained}",
        "passkey.lengths=[400]",
        "passkey.depths=[0,1]",
        "passkey.trials=2",
    )
    assert run_mode(*words, "model.interpolate_positions=true") == 0
    assert "depth 100%" in capsys.readouterr().out
    result = read_result(trained / "passkey" / "result.json")
    assert [(row["length"], row["depth"], row["accuracy"]) for row in result.rows] == [
        (400, 0.0, 0.0),
        (400, 1.0, 0.0),
    ]
    assert f"mode=passkey checkpoint={trained} passkey.lengths=[400]" in result.command
