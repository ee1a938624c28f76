"""Tokenizers in the form that transformers' AutoTokenizer reads: the same ids,
and the same text back."""

from __future__ import annotations

import json

import pytest
import torch

from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.tokenizers import ByteTokenizer, load_tokenizer
from flashtrain.data.wordpiece import SpecialTokens, WordPieceTokenizer
from flashtrain.integrations import save_bert, save_decoder, save_tokenizer, save_weights
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig

transformers = pytest.importorskip("transformers")

TEXTS = (
    "The quick brown fox doesn't jump 1234 times.",
    "ünï ☃ 日本語 🎉\u200d\u0301",
    "  def f(x):\n\n\t  return  x   \r\n",
    "a\x00b",
    "",
)
SPELT = "one<|endoftext|>two"


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(["the quick brown fox jumps over the lazy dog "] * 20, 300)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "bytes" else bpe


def decoder(vocab_size: int, family: str = "gpt2") -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig.of_size("demo", family, vocab_size=vocab_size, context=32), attention="sdpa"
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_export_has_the_tokenizer_of_its_model(tokenizer, family, tmp_path) -> None:
    model = decoder(tokenizer.vocab_size, family)
    (save_decoder if family == "gpt2" else save_weights)(model, tmp_path)
    assert save_tokenizer(tokenizer, tmp_path, context=32) == "AutoTokenizer reads its tokenizer"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == model.config.vocab_size
    assert theirs.bos_token_id == theirs.eos_token_id == tokenizer.end_of_text
    assert theirs.model_max_length == 32
    # GPT-2 would add an embedding for token_type_ids.
    assert set(theirs("a")) == {"input_ids", "attention_mask"}
    assert load_tokenizer(tmp_path).fingerprint() == tokenizer.fingerprint()
    for text in TEXTS:
        assert theirs(text).input_ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text


def test_a_spelt_end_of_text_is_a_special_token_to_transformers_and_text_to_us(
    tokenizer, tmp_path
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ends = [*tokenizer.encode("one"), tokenizer.end_of_text, *tokenizer.encode("two")]
    assert theirs(SPELT).input_ids == ends
    assert theirs(SPELT, split_special_tokens=True).input_ids == tokenizer.encode(SPELT)
    assert theirs.decode(ends) == tokenizer.decode(ends) == SPELT


@pytest.mark.parametrize("segments", [0, 2])
def test_a_bert_export_puts_its_four_tokens_around_a_text(tokenizer, segments, tmp_path) -> None:
    special = SpecialTokens.past(tokenizer.vocab_size)
    sizes = {"vocab_size": special.vocab_size, "vocab_rows": special.vocab_size, "context": 32}
    config = BertConfig(**sizes, layers=1, heads=1, embed=8, ffn=8, segments=segments)
    model = Bert(config, "sdpa")
    save_bert(model, tmp_path, pad_token=special.pad)
    save_tokenizer(tokenizer, tmp_path, special=special, segments=segments > 0)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == config.vocab_size
    ids = (theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id)
    assert ids == (special.pad, special.classify, special.separate, special.mask)
    one, two = tokenizer.encode(TEXTS[0]), tokenizer.encode(TEXTS[2])
    assert theirs(TEXTS[0]).input_ids == [special.classify, *one, special.separate]
    assert theirs(TEXTS[0], add_special_tokens=False).input_ids == one
    both = theirs(TEXTS[0], TEXTS[2])
    assert both.input_ids == [special.classify, *one, special.separate, *two, special.separate]
    assert both.get("token_type_ids") == (
        [0] * (len(one) + 2) + [1] * (len(two) + 1) if segments else None
    )
    # the four are past flashtrain's tokenizer.
    assert load_tokenizer(tmp_path).vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("lower", [None, True, False])
def test_wordpiece_is_the_same_for_transformers(lower, tmp_path) -> None:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "The",
        "qu",
        "##ick",
        "fox",
        "!",
        "un",
        "##i",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    if lower is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    ours = WordPieceTokenizer.load(tmp_path)
    assert ours is not None
    export = tmp_path / "export"
    config = BertConfig(len(words), len(words), context=32, layers=1, heads=1, embed=8, ffn=8)
    save_bert(Bert(config, "sdpa"), export)
    save_tokenizer(ours, export, context=32, special=ours.special, segments=True)
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    assert (len(theirs), theirs.model_max_length) == (config.vocab_size, 32)
    for text in ("The quick fox!", "  the\tfox\nüni [MASK] fox ☃"):
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
        assert theirs(text).input_ids == [
            ours.special.classify,
            *ours.encode(text),
            ours.special.separate,
        ]
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert load_tokenizer(export).encode("The quick fox!") == ours.encode("The quick fox!")


def test_a_tokenizer_of_another_kind_is_reported_as_none(tmp_path) -> None:
    class Own(ByteTokenizer):
        pass

    special = SpecialTokens.past(1000)  # of a vocabulary that the tokenizer does not fill
    assert "no tokenizer that transformers could read" in save_tokenizer(
        Own(), tmp_path / "export", special=special
    )
    assert not (tmp_path / "export").exists()
