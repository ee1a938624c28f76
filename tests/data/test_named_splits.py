"""Files that are named for a split are that split, of texts, conversations,
tokens and streams alike."""

from __future__ import annotations

import json
from pathlib import Path, PurePath

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from chat_folders import CHATML, save_tokenizer_folder

from flashtrain.command.compose import compose_settings
from flashtrain.data.chat_datamodule import ChatDataModule
from flashtrain.data.chat_source import ChatFiles
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.mixture import MixtureSource
from flashtrain.data.split_names import by_split
from flashtrain.data.streaming import StreamingDataModule
from flashtrain.data.text_files import FilesSource
from flashtrain.data.tokenizers import TokenizerSpec
from flashtrain.errors import UserError
from flashtrain.tasks.language.prepare import make_data
from flashtrain.training.hardware import detect_hardware

TRAIN, HELD_OUT, TEST = (
    [f"{name} text number {number}. " * 3 for number in range(9)] for name in ("a", "b", "c")
)


def write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, texts in (("train", TRAIN), ("validation", HELD_OUT), ("test", TEST)):
        write(tmp_path / "texts" / f"{name}.jsonl", texts)
    return tmp_path / "texts"


@pytest.mark.parametrize(
    ("names", "held_out", "left_out"),
    [
        (["train.jsonl", "valid.jsonl"], ["valid.jsonl"], []),
        (["train.jsonl.gz", "val.jsonl.xz", "test.jsonl"], ["val.jsonl.xz"], ["test.jsonl"]),
        (["data/train-00000-of-00002.parquet", "data/dev-00000-of-00001.parquet"],
         ["data/dev-00000-of-00001.parquet"],
         []),
        (["books-train.jsonl", "books-validation.jsonl"], ["books-validation.jsonl"], []),
        (["train/a.txt", "validation/a.txt", "test/a.txt"], ["validation/a.txt"], ["test/a.txt"]),
        (["a.jsonl", "b.jsonl", "validation_1.jsonl"], ["validation_1.jsonl"], []),
        (["trainset.txt", "testset.txt"], [], ["testset.txt"]),
        (["how-to-test.md", "valid reasons.md", "interval.md", "notes/dev/a.md"], [], []),
        (["validation.jsonl"], [], []),  # nothing else to train on
        (["test.txt", "val.txt"], [], []),
    ],
)  # fmt: skip
def test_names_say_splits(names: list[str], held_out: list[str], left_out: list[str]) -> None:
    found = by_split({PurePath(name): name for name in names})
    assert (found.get("validation", []), found.get("test", [])) == (held_out, left_out)
    assert found["train"] == [name for name in names if name not in (*held_out, *left_out)]


def texts_of(module: TextDataModule, side: str) -> list[str]:
    spans = getattr(module.split, side)
    tokens = [module.cache.tokens[a : b - 1] for a, b in zip(spans.begins, spans.ends, strict=True)]
    return [module.tokenizer.decode(ids.tolist()) for ids in tokens]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_texts_of_a_folder_train_validate_and_test_apart(folder: Path, tokenizer: str) -> None:
    spec = TokenizerSpec(tokenizer, vocab_size=300)
    data = TextDataModule(FilesSource(folder), spec, 16, 2, validation_fraction=0.02)
    assert (texts_of(data, "training"), texts_of(data, "validation")) == (TRAIN, HELD_OUT)
    (batch, *_) = data.val_dataloader()
    assert data.tokenizer.decode(batch["tokens"][0].tolist()).startswith("b text")
    none = TextDataModule(FilesSource(folder), spec, 16, 2, validation_fraction=0.0)
    assert (texts_of(none, "training"), none.split.validation) == (TRAIN, None)


def test_a_path_for_validation_is_held_out_whole_or_by_its_own_names(
    folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "alone.parquet", HELD_OUT)
    words = [
        "recipe=gpt2",
        "data=files",
        f"data.path={folder / 'train.jsonl'}",
        "data.tokenizer=bytes",
        "context=16",
    ]
    for validation in (tmp_path / "alone.parquet", folder):
        settings = compose_settings([*words, f"data.validation_path={validation}"])
        data = make_data(settings, detect_hardware("cpu"))
        assert (texts_of(data, "training"), texts_of(data, "validation")) == (TRAIN, HELD_OUT)


def test_folders_without_such_names_have_the_fingerprint_that_they_had(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one"])
    write(tmp_path / "b.jsonl", ["two"])
    known = "3d85dfccc11f65d4ead1a24543e0607eb0c9f6e7c70022298bfb4d5d9c070654"
    assert FilesSource(tmp_path).fingerprint() == known
    write(tmp_path / "validation.jsonl", ["three"])
    assert FilesSource(tmp_path).fingerprint() == known


def test_masked_samples_mixtures_and_streams_hold_the_named_files_out(folder: Path) -> None:
    masked = MaskedTextDataModule(FilesSource(folder), "bytes", 64, 256)
    assert (texts_of(masked, "training"), texts_of(masked, "validation")) == (TRAIN, HELD_OUT)
    assert next(iter(masked.val_dataloader())) is not None
    mixed = TextDataModule(MixtureSource({"x": (FilesSource(folder), 1.0)}), "bytes", 16, 2)
    assert (mixed.train_tokens, mixed.validation_tokens) == (
        masked.train_tokens,
        masked.validation_tokens,
    )
    stream = StreamingDataModule(
        FilesSource(folder), "bytes", 16, 2, total_steps=9, validation_samples=99
    )
    assert stream.validation_tokens == masked.validation_tokens
    ids = torch.cat([batch["tokens"].flatten() for batch in stream.train_dataloader()]).tolist()
    read = stream.tokenizer.decode(ids)
    assert [text in read for text in ("a text", "b text", "c text")] == [True, False, False]


def test_tokens_of_a_test_are_not_trained_on_and_a_path_validates(tmp_path: Path) -> None:
    for name, begin in (("train", 0), ("test", 100), ("other/more", 200)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", np.arange(begin, begin + 50, dtype="uint16"))
    words = [
        "recipe=gpt2",
        "data=tokens",
        "data.vocab_size=300",
        "context=16",
        "data.validation_fraction=0.4",
    ]
    for more in (
        [f"data.path={tmp_path}"],
        [f"data.path={tmp_path / 'train.npy'}", f"data.validation_path={tmp_path / 'other'}"],
    ):
        data = make_data(compose_settings([*words, *more]), detect_hardware("cpu"))
        assert data.train_tokens + data.validation_tokens == 100
        assert 100 not in data.cache.tokens[0:100]
    assert (data.train_tokens, data.validation_tokens) == (50, 50)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    for name, texts in (("train", TRAIN), ("validation", HELD_OUT), ("test", TEST)):
        rows = [
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
            for text in texts
        ]
        path = tmp_path / "chats" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return tmp_path / "chats"


@pytest.mark.parametrize("path", [None, "validation.jsonl"])
def test_conversations_of_a_folder_train_validate_and_test_apart(
    chats: Path, tmp_path: Path, path: str | None
) -> None:
    model = save_tokenizer_folder(tmp_path / "model", CHATML)
    source = chats if path is None else chats / "train.jsonl"
    validation = None if path is None else ChatFiles(chats / path)
    for fraction, held_out in ((0.02, HELD_OUT), (0.0, [])):
        options = {"total_steps": 20, "validation": validation, "validation_fraction": fraction}
        data = ChatDataModule(source, model, context=128, **options)
        data.setup()
        assert [len(side.begins) for side in data.documents] == [9, len(held_out)]
        for loader, texts in ((data.train_dataloader(), TRAIN), (data.val_dataloader(), held_out)):
            read = " ".join(
                data.tokenizer.decode(row) for batch in loader for row in batch["tokens"].tolist()
            )
            assert [text in read for text in (*TRAIN, *HELD_OUT, *TEST)] == [
                text in texts for text in (*TRAIN, *HELD_OUT, *TEST)
            ]


def test_held_out_files_that_are_too_short_are_named(folder: Path) -> None:
    write(folder / "validation.jsonl", ["x"])
    data = TextDataModule(FilesSource(folder), "bytes", 64, 2)
    with pytest.raises(UserError, match=r"2 tokens are fewer than the 65 .* context=64"):
        data.val_dataloader()
