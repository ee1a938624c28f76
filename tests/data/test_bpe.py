"""The byte-level BPE: trained, and GPT-2's from its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from flashtrain.data import bpe
from flashtrain.data.bpe import BPETokenizer, gpt2_tokenizer, split_long
from flashtrain.errors import UserError


@pytest.fixture
def files(tmp_path):
    """GPT-2's two files in small: the byte symbols, three merges, and the end of text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, "th", "the", "\u0120the", "<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n\u0120 the\n", encoding="utf-8")
    return tmp_path / "encoder.json", tmp_path / "vocab.bpe"


def test_gpt2s_files_give_its_merges_and_ids(files):
    tokenizer = gpt2_tokenizer(*files)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (260, 259)
    assert tokenizer.encode("the the") == [257, 258]
    assert tokenizer.decode([257, 258, 259]) == "the the<|endoftext|>"


def test_the_end_of_text_is_added_where_the_files_lack_it(files):
    vocab, merges = files
    vocabulary = json.loads(vocab.read_text())
    del vocabulary["<|endoftext|>"]
    vocab.write_text(json.dumps(vocabulary))
    assert gpt2_tokenizer(vocab, merges).end_of_text == 259


def test_what_is_wrong_with_the_files_is_one_line(files, tmp_path):
    vocab, merges = files

    (tmp_path / "few.json").write_text('{"a": 0}')
    (tmp_path / "unknown.bpe").write_text("q x\n")
    for pair in (
        (merges, merges),
        (tmp_path / "few.json", merges),
        (vocab, tmp_path / "unknown.bpe"),
    ):
        with pytest.raises(UserError, match=f"the tokenizer {pair[0]} cannot be read: "):
            gpt2_tokenizer(*pair)


def test_without_files_they_come_from_the_hub(files, monkeypatch):
    import huggingface_hub

    found = {"vocab.json": str(files[0]), "merges.txt": str(files[1])}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name: found[name])
    assert gpt2_tokenizer().fingerprint() == gpt2_tokenizer(*files).fingerprint()


def test_without_the_hub_the_settings_for_local_files_are_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: Path("no/such").read_text())
    with pytest.raises(UserError, match=r"data\.vocab=FILE data\.merges=FILE"):
        gpt2_tokenizer()


def test_a_long_text_has_the_tokens_of_the_whole(monkeypatch):
    tokenizer = BPETokenizer.train(["some words and other words\n"] * 5, 290)
    text = "some  words and\n\nother words, \t \r\n it's 12 \u00e9 " * 40 + "x" * 80
    whole = tokenizer.encode(text)
    assert max(map(len, split_long(text, 37))) == 37
    monkeypatch.setattr(bpe, "MAX_PIECE_CHARACTERS", 37)
    monkeypatch.setattr(bpe, "split_long", lambda text: split_long(text, 37))
    assert tokenizer.encode(text) == whole


def test_forks_after_encoding_neither_warn_nor_hang_and_a_users_choice_stays():
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from flashtrain.data.bpe import BPETokenizer\n"
        "t = BPETokenizer.train(['some text'] * 100, 270); t.encode_batch(['some text'] * 100)\n"
        "pid = os.fork()\n"
        "if pid == 0: t.encode_batch(['some text'] * 100); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "print(os.environ.get('TOKENIZERS_PARALLELISM'))\n"
    )
    root = str(Path(__file__).parents[2])
    for chosen, after in ((None, "None"), ("0", "0")):
        environment = {
            name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"
        }
        if chosen:
            environment["TOKENIZERS_PARALLELISM"] = chosen
        words = [sys.executable, "-c", program, root]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == after
        assert "forked" not in done.stderr
