"""What AutoTokenizer puts before a text stands before each document, in every kind of rows;
nothing where it is off."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from chat_folders import save_tokenizer_folder
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from flashtrain.data.chat_datamodule import ChatDataModule
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.mixture import MixtureSource
from flashtrain.data.streaming import StreamingDataModule
from flashtrain.data.text_stream import Place
from flashtrain.data.token_cache import folder_of
from flashtrain.data.tokenizers import (
    TokenizerSpec,
    as_document,
    as_prompt,
    begin_of,
    huggingface_tokenizer,
)

TEXTS = ["hello there", "a second text", "and a third one, which is longer"] * 2


@pytest.fixture(params=[True, False], ids=["begins", "plain"])
def folder(request, tmp_path):
    return save_tokenizer_folder(
        tmp_path / "tokenizer", words="hello there " * 9, begins=request.param
    )


def expected(folder) -> set[tuple[int, ...]]:
    """The documents as transformers has their ids, each before the end of text."""
    theirs = AutoTokenizer.from_pretrained(folder)
    return {(*theirs(text).input_ids, theirs.eos_token_id) for text in TEXTS}


def in_cache(module) -> set[tuple[int, ...]]:
    module.prepare_data()
    cache = getattr(module.cache, "caches", [module.cache])[0]
    return {
        tuple(cache.tokens[a:b].tolist())
        for a, b in zip(cache.offsets, cache.offsets[1:], strict=False)
    }


def test_a_token_file_holds_it_before_each_document(folder, list_source):
    for source in (list_source(TEXTS), MixtureSource({"one": (list_source(TEXTS), 1.0)})):
        for tokenizer in (str(folder), huggingface_tokenizer(folder)):
            module = TextDataModule(source, tokenizer, context=8)
            assert in_cache(module) == expected(folder)


def test_streamed_documents_have_it_held_out_ones_too(folder, list_source):
    for fraction, named in ((0.1, list_source(TEXTS)), (0, None)):
        options = {"validation": named, "validation_fraction": fraction}
        module = StreamingDataModule(list_source(TEXTS), str(folder), 4, 1, **options)
        module.prepare_data()
        documents = islice(module.train_dataloader().stream.documents(Place()), 12)
        found = in_cache(module) if named else {tuple(ids.tolist()) for ids, _ in documents}
        assert found == expected(folder)


def test_texts_among_conversations_have_it_once_and_none_where_it_is_off(folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = in_cache(ChatDataModule(path, folder, context=64))
    assert found == expected(folder)
    off = ChatDataModule(path, TokenizerSpec(str(folder), begin_of_text=False), context=64)
    count = len(begin_of(huggingface_tokenizer(folder)))
    assert in_cache(off) == {ids[count:] for ids in found}


def test_masked_samples_have_none(folder, list_source):
    for tokenizer in (str(folder), huggingface_tokenizer(folder)):
        module = MaskedTextDataModule(list_source(TEXTS), tokenizer, 16, 32)
        count = len(begin_of(huggingface_tokenizer(folder)))
        assert in_cache(module) == {ids[count:] for ids in expected(folder)}


@pytest.mark.parametrize(
    ("template", "config"),
    [
        ("$A", {}),
        ("$A <|end|>", {}),
        ("<|begin|> $A <|end|>", {}),
        ("<|im_start|> <|begin|> $A", {}),  # GLM-4's two
        ("<|begin|> $A", {"add_bos_token": False}),
        ("$A", {"add_bos_token": True}),
    ],
)
def test_it_is_all_that_transformers_puts_before_a_text(template, config, tmp_path):
    folder = save_tokenizer_folder(tmp_path / "tokenizer")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(name, made.token_to_id(name)) for name in ("<|begin|>", "<|end|>", "<|im_start|>")]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, **config}))
    tokenizer = huggingface_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)("hello").input_ids
    ours = as_prompt(tokenizer, "hello")
    assert ours == theirs[: len(ours)]
    assert theirs[len(ours) :] in ([], [tokenizer.end_of_text])
    document = as_document(tokenizer, np.array(tokenizer.encode("hello")))
    assert (document.dtype, document.tolist()) == (np.int64, [*ours, tokenizer.end_of_text])


def test_off_it_is_off_in_transformers_too_and_the_cache_is_another(folder, tmp_path):
    off = huggingface_tokenizer(folder, begin_of_text=False)
    assert as_prompt(off, "hello") == off.encode("hello")
    off.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("hello").input_ids == off.encode(
        "hello"
    )
    begins = bool(begin_of(huggingface_tokenizer(folder)))
    places = {
        folder_of("text", TokenizerSpec(str(folder), begin_of_text=on), None)
        for on in (True, False)
    }
    assert len(places) == 1 + begins
    assert (off.fingerprint() != huggingface_tokenizer(folder).fingerprint()) == begins
