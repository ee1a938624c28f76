"""Byte tokens, the choice of a tokenizer, and saving and loading any of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from flashtrain.data.library_tokenizer import LibraryTokenizer
from flashtrain.data.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    TokenizerSpec,
    check_same_tokens,
    load_tokenizer,
    make_tokenizer,
)
from flashtrain.errors import UserError

TEXTS = ["the cat sat on the mat", "a cat and another cat", "the end"] * 5


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request) -> Tokenizer:
    return make_tokenizer(TokenizerSpec(request.param, vocab_size=300), lambda: TEXTS)


def test_the_byte_tokenizer_has_257_tokens_the_last_for_the_end_of_text():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_every_tokenizer_fits_the_protocol_and_gives_back_the_text(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    for text in (*TEXTS, "", "ü€😀", "  spaces\n\n", "<|endoftext|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.end_of_text not in tokenizer.encode(text)


def sentencepiece(model: models.Model, *before: decoders.Decoder) -> LibraryTokenizer:
    """A tokenizer as SentencePiece's: spaces are letters, and a text begins with one of its own."""
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaces = [decoders.Replace("▁", " "), *before, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(spaces)
    library.add_special_tokens(["</s>"])
    library.add_tokens(["<ü>"])
    return LibraryTokenizer(library, library.token_to_id("</s>"))


def byte_fallback() -> LibraryTokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"acehnotdm", "▁c", "at"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "c"), ("a", "t")]
    vocabulary |= {"".join(pair): vocabulary["".join(pair)] for pair in merges}
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    return sentencepiece(model, decoders.ByteFallback())


def unigram() -> LibraryTokenizer:
    letters = [(one, -3.0) for one in "acdehmnorst▁ü€😀\n"]
    return sentencepiece(models.Unigram([("<unk>", 0.0), *letters, ("▁cat", -1.0)], unk_id=0))


@pytest.mark.parametrize(
    ("made", "begins"),
    [
        (lambda: make_tokenizer(TokenizerSpec("bytes")), 0),
        (lambda: make_tokenizer(TokenizerSpec("bpe", vocab_size=300), lambda: TEXTS), 0),
        (byte_fallback, 1),
        (unigram, 1),
    ],
    ids=["bytes", "bpe", "byte fallback", "unigram"],
)
def test_the_bytes_of_a_text_are_those_of_its_tokens_also_of_a_part_of_a_character(made, begins):
    tokenizer = made()
    for text in (*TEXTS, "a  cat\n\non", "ü€😀 a cat", "the ü cat"):
        ids = tokenizer.encode(text)
        parts = [ids, [*ids, tokenizer.end_of_text], [*ids[3:], *ids[:3]]]
        counted = {tokenizer.text_bytes(Counter(part)) for part in parts}
        halves = (ids[: len(ids) // 2], ids[len(ids) // 2 :])
        # SentencePiece's own space before a text is a byte of its first token.
        assert counted == {len(text.encode()) + begins}
        assert sum(tokenizer.text_bytes(Counter(half)) for half in halves) in counted
    assert tokenizer.text_bytes(Counter()) == 0


def test_an_added_token_that_is_not_special_is_text():
    tokenizer = unigram()
    assert tokenizer.text_bytes({tokenizer.encode("a <ü>")[-1]: 2}) == 2 * len("<ü>".encode())


def test_a_saved_tokenizer_loads_as_itself(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.encode("the cat") == tokenizer.encode("the cat")
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_a_run_is_not_resumed_in_tokens_that_were_trained_on_another_text(tokenizer, tmp_path):
    check_same_tokens(tokenizer, tmp_path)  # a run of an older version, which saved none
    tokenizer.save(tmp_path)
    check_same_tokens(tokenizer, tmp_path)
    check_same_tokens(ByteTokenizer(), tmp_path)
    other = make_tokenizer(
        TokenizerSpec("bpe", vocab_size=300), lambda: ["zebras and xylophones"] * 9
    )
    with pytest.raises(UserError, match="the text has changed"):
        check_same_tokens(other, tmp_path)


def test_loading_says_where_no_tokenizer_is(tmp_path):
    for content in (None, "{}"):
        if content is not None:
            (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(UserError, match=f"no tokenizer saved by flashtrain in {tmp_path}"):
            load_tokenizer(tmp_path)


def test_a_bpe_is_trained_on_the_first_bytes_only():
    texts = ["aaaa bbbb " * 10, "cccc dddd " * 100]
    spec = TokenizerSpec("bpe", vocab_size=300, sample_bytes=100)
    learnt = make_tokenizer(spec, lambda: texts)
    assert len(learnt.encode("aaaa")) == 1
    assert len(learnt.encode("cccc")) == 4


def test_the_key_of_a_spec_names_what_decides_the_ids(tmp_path):
    def files(folder, merge):
        folder.mkdir()
        (folder / "vocab.json").write_text(json.dumps({"a": 0}))
        (folder / "merges.txt").write_text(merge)
        return TokenizerSpec(
            "gpt2", vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
        ).key()

    first, same, other = (
        files(tmp_path / "1", "a a"),
        files(tmp_path / "2", "a a"),
        files(tmp_path / "3", "a b"),
    )
    assert first == same != other
    assert TokenizerSpec("bpe", vocab_size=300).key() != TokenizerSpec("bpe", vocab_size=301).key()
    assert TokenizerSpec("bytes").key() == TokenizerSpec("bytes", vocab_size=5).key()
