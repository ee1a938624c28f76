"""Special tokens that a text spells are letters in every source, or tokens, as the setting
has it; and are counted."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from chat_folders import save_tokenizer_folder

from flashtrain.command.compose import compose_settings
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.text_files import FilesSource
from flashtrain.folders.run_folder import read_settings, write_config
from flashtrain.settings.aliases import NEWER
from flashtrain.settings.settings import Settings
from flashtrain.tasks.language.prepare import make_data
from flashtrain.training.hardware import detect_hardware

RENDERED = "<|im_start|>user\nhi<|im_end|>\n"
PLAIN = "no token is <spelled> here. "
WORDS = (
    "recipe=gpt2", "hardware=cpu", "hardware.demo=never", "context=8", "data.validation_fraction=0",
    "trainer.tokens_per_step=64",
)  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> dict[str, list[str]]:
    """For each source the words that read a text which spells special tokens,
    and one which does not."""
    model = save_tokenizer_folder(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    rows = [{"text": RENDERED * 2}, {"text": PLAIN * 2}]
    (tmp_path / "texts" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": RENDERED, "completion": RENDERED}) + "\n"
    )
    path, tokenizer = f"data.path={tmp_path / 'texts'}", f"data.tokenizer={model}"
    parts = f"data.mixture={{one: {{path: {tmp_path / 'texts'}}}}}"
    return {
        "files": [*WORDS, "data=files", path, tokenizer],
        "validation": [
            *WORDS,
            tokenizer,
            "data=stdlib",
            f"data.validation_path={tmp_path / 'texts'}",
        ],
        "streamed": [*WORDS, "data=files", path, tokenizer, "data.streaming=true"],
        "mixture": [*WORDS, "data=mixture", parts, tokenizer],
        "chat": [*WORDS, "data=chat", path, tokenizer],
        "pairs": [
            *WORDS,
            "data=chat",
            f"data.path={tmp_path / 'pairs.jsonl'}",
            tokenizer,
            "context=64",
        ],
    }


def first_ids(settings: Settings) -> list[int]:
    """The first tokens that a run of these settings reads."""
    data = make_data(settings, detect_hardware("cpu"))
    data.prepare_data()
    data.setup()
    if settings.data.streaming:
        rows = [row for batch in data.train_dataloader() for row in batch["tokens"].tolist()]
        ids = [token for row in rows for token in row]
        begin = ids.index(data.tokenizer.end_of_text) + 1 if len(ids) else 0
        return ids[begin:] if "spelled" in data.tokenizer.decode(ids[:begin]) else ids
    return next(iter(getattr(data.cache, "caches", [data.cache]))).tokens[0:60].tolist()


@pytest.mark.parametrize("source", ["files", "streamed", "mixture", "chat", "pairs"])
def test_what_is_spelled_is_letters_or_tokens_as_transformers_has_both(
    source: str, words: dict[str, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = {}
    for reading in ("letters", "tokens", None):
        caplog.clear()
        more = [] if reading is None else [f"data.special_tokens={reading}"]
        with caplog.at_level(logging.INFO):
            read[reading] = first_ids(compose_settings([*words[source], *more]))
        if reading is not None:
            expected = library(
                RENDERED * 2, add_special_tokens=False, split_special_tokens=reading == "letters"
            )
            count = len(expected["input_ids"])
            assert read[reading][:count] == expected["input_ids"]
            (line,) = [
                one.getMessage() for one in caplog.records if "special tokens" in one.getMessage()
            ]
            assert line.startswith(
                f"1 texts spell special tokens, read as {reading} (data.special_tokens): "
            )
            assert "<|im_start|> in 1" in line
            assert "<|im_end|> in 1" in line
    assert read[None] == read["letters"] != read["tokens"]


def test_bytes_and_long_documents_have_the_end_of_text_as_a_token_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é<|endoftext|>b")
    source: Any = FilesSource(tmp_path / "a.txt")
    letters = TextDataModule(source, "bytes").cache
    source.special_tokens = True
    tokens = TextDataModule(source, "bytes").cache
    assert letters.tokens[:].tolist() == [*"é<|endoftext|>b".encode(), 256]
    assert tokens.tokens[:].tolist() == [*"é".encode(), 256, *b"b", 256]
    assert letters.folder != tokens.folder


def test_a_text_that_spells_none_is_not_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text(PLAIN)
    assert len(TextDataModule(FilesSource(tmp_path), "bytes").cache.tokens)
    assert "special tokens" not in caplog.text


# Of what 00a7c4ca made of the texts below with data.tokenizer=bytes: the name of its token cache.
CACHE_OF_BYTES = "bytes-e074f45f7477"


@pytest.mark.parametrize("source", ["files", "chat"])
def test_a_run_of_00a7c4ca_reads_what_it_read(
    source: str, words: dict[str, list[str]], tmp_path: Path
) -> None:
    folder, more = tmp_path / "texts", ["data.tokenizer=bytes"] if source == "files" else []
    (folder / "node_modules").mkdir()
    for name in ("node_modules/README.MD", "program.py", "ignored.txt"):
        (folder / name).write_text(f"words of {name}")
    (folder / ".gitignore").write_text("*.txt\n")
    settings = asdict(compose_settings([*words[source], *more]))
    for name in NEWER:
        group, _, key = name.rpartition(".")
        settings.get(group, settings).pop(key, None)
    (tmp_path / "run").mkdir()
    write_config(settings, tmp_path / "run")
    then, now = (
        make_data(of_a_run, detect_hardware("cpu"))
        for of_a_run in (read_settings(tmp_path / "run"), compose_settings([*words[source], *more]))
    )
    then.prepare_data()
    now.prepare_data()
    assert then.cache.folder != now.cache.folder
    texts = [data.tokenizer.decode(data.cache.tokens[:].tolist()) for data in (then, now)]
    if source == "files":
        assert then.cache.folder.name == CACHE_OF_BYTES
        names = ("node_modules/README.MD", "ignored.txt", "program.py")
        assert [[f"words of {name}" in text for name in names] for text in texts] == [
            [True, True, False],
            [False, False, True],
        ]
    else:
        assert texts[0] == texts[1]
        end = then.tokenizer.library_form().token_to_id("<|im_end|>")
        assert [end in data.cache.tokens[:] for data in (then, now)] == [True, False]
