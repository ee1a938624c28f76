"""Rows of conversations from files, tables and saved datasets, and what becomes of broken ones."""

from __future__ import annotations

import gzip
import json
import logging

import pytest
from chat_folders import CHATML, ENDLESS, SILENT, THINKING, save_tokenizer_folder

from flashtrain.data.chat_source import ChatDataset, ChatFiles, ChatSource
from flashtrain.data.chat_template import ChatTemplate
from flashtrain.data.token_cache import open_or_build
from flashtrain.data.tokenizers import huggingface_tokenizer
from flashtrain.errors import UserError

ASK, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}
TALK = {"messages": [ASK, ANSWER]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {"x": 1}}}]}


@pytest.fixture
def template(tmp_path) -> ChatTemplate:
    return ChatTemplate(
        huggingface_tokenizer(save_tokenizer_folder(tmp_path / "tokenizer", CHATML))
    )


@pytest.fixture
def file(tmp_path):
    def written(*lines: object, name: str = "chats.jsonl") -> ChatFiles:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return ChatFiles(path)

    return written


def texts(rows, template: ChatTemplate, **options) -> list[str]:
    found = ChatSource(rows, template, **options).encoded(template.tokenizer)
    return [template.tokenizer.decode(tokens) for group in found for tokens in group.tokens]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_a_line_is_a_conversation_a_pair_or_a_text(file, template, name):
    found = texts(
        file(TALK, {"prompt": "1+1=", "completion": "2"}, "", {"text": "plain"}, name=name),
        template,
    )
    assert found == ["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n",
                     "1+1=2<|end|>",
                     "plain<|end|>"]  # fmt: skip


def test_parquet_and_saved_datasets_hold_the_same_conversations_as_lines(
    file, template, tmp_path, monkeypatch
):
    """Their tables fill in null for the keys that other messages have."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    rows = [TALK, {"messages": [ASK, CALL, {"role": "tool", "content": "sunny"}, ANSWER]}]
    expected = texts(file(*rows), template)
    assert '<call>{"x": 1}</call>' in expected[1]
    table = datasets.Dataset.from_list(rows)
    (tmp_path / "table").mkdir()
    table.to_parquet(tmp_path / "table" / "chats.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(
        tmp_path / "splits"
    )
    assert texts(ChatFiles(tmp_path / "table"), template) == expected
    assert texts(ChatDataset(str(tmp_path / "saved")), template) == expected
    assert texts(ChatDataset(str(tmp_path / "splits"), split="test"), template) == expected[:1]
    assert texts(ChatDataset(str(tmp_path / "table")), template) == expected  # as one of the hub is
    with pytest.raises(UserError, match=r"data\.split 'dev'"):
        texts(ChatDataset(str(tmp_path / "splits"), split="dev"), template)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"messages": [', r"chats\.jsonl:2: .*JSON"),
        ({"messages": [ASK]}, r"chats\.jsonl:2: no message .* data\.train_on=all"),
        ({"dialog": []}, r"chats\.jsonl:2: .*dialog: expected messages"),
    ],
)
def test_a_broken_line_is_named_and_refused(file, template, line, told):
    with pytest.raises(UserError, match=told):
        texts(file(TALK, line, TALK), template)


def test_a_share_of_broken_lines_may_be_left_out_with_a_line_that_reports_it(
    file, template, caplog
):
    caplog.set_level(logging.WARNING)
    rows = file(TALK, "{", TALK, {"messages": [ASK]}, TALK)
    assert len(texts(rows, template, skip_broken=0.5)) == 3
    assert "skipped 2 of 5 rows" in caplog.text
    assert "chats.jsonl:2" in caplog.text
    with pytest.raises(
        UserError, match=r"2 of 5 rows are broken, more than data\.skip_broken=0\.3.*chats\.jsonl:2"
    ):
        texts(rows, template, skip_broken=0.3)


def test_rows_of_a_table_and_a_folder_without_conversations_are_named_too(template, tmp_path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [[ASK, ANSWER], [ASK]]}), tmp_path / "chats.parquet"
    )
    with pytest.raises(UserError, match=r"chats\.parquet: row 2: no message .* data\.train_on=all"):
        texts(ChatFiles(tmp_path / "chats.parquet"), template)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("no conversation")
    with pytest.raises(
        UserError, match=r"data\.path=.*notes: expected conversations in \.jsonl .*: 1 \.txt"
    ):
        texts(ChatFiles(tmp_path / "notes"), template)


def test_conversations_are_cached_as_tokens_with_a_mark_for_each(file, template, tmp_path, caplog):
    source = ChatSource(file(TALK, {"text": "plain"}), template)
    cache = open_or_build(source, template.tokenizer, tmp_path / "cache")
    marks = cache.marks[:]
    assert len(marks) == len(cache.tokens)
    assert template.tokenizer.decode(cache.tokens[:][marks == 1]) == "Hi.<|im_end|>\nplain<|end|>"
    again = open_or_build(source, template.tokenizer, tmp_path / "cache")
    assert again.folder == cache.folder
    other = ChatSource(source.rows, ChatTemplate(template.tokenizer, train_on="all"))
    assert open_or_build(other, template.tokenizer, tmp_path / "cache").folder != cache.folder


def test_what_a_template_rewrites_is_reported_in_a_line(file, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rewriting = ChatTemplate(
        huggingface_tokenizer(save_tokenizer_folder(tmp_path / "other", THINKING))
    )
    thought = {"role": "assistant", "content": "<think>hm</think>Hi."}
    assert len(texts(file({"messages": [ASK, thought, ASK, thought]}, TALK), rewriting)) == 3
    assert "the chat template rewrites earlier turns, so 1 conversations are split" in caplog.text


def test_a_line_says_that_nothing_teaches_the_model_to_stop(file, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    for name, jinja in (("marker", ENDLESS), ("none", ENDLESS.replace("[INST]", "user:"))):
        template = ChatTemplate(
            huggingface_tokenizer(save_tokenizer_folder(tmp_path / name, jinja))
        )
        caplog.clear()
        texts(file(TALK, TALK, {"text": "plain"}), template)
        assert ("the model will not learn to stop" in caplog.text) == (name == "none")
    assert "(2 conversations)" in caplog.text


def test_a_line_counts_the_conversations_of_which_the_template_leaves_something_out(
    file, tmp_path, caplog
):
    """An answer that it does not write is broken instead, and is counted with other broken rows."""
    caplog.set_level(logging.WARNING)
    template = ChatTemplate(
        huggingface_tokenizer(save_tokenizer_folder(tmp_path / "silent", SILENT))
    )
    thought, named = {**ANSWER, "reasoning_content": "hm"}, {**ASK, "name": "Ann"}
    rows = [{"messages": [ASK, thought, ASK, thought]}, {"messages": [named, thought]}, TALK,
            {"messages": [ASK, {**CALL, "content": "Let me see."}, ASK, ANSWER]}]  # fmt: skip
    for _ in range(2):  # each time from 0
        caplog.clear()
        assert len(texts(file(*rows), template, skip_broken=0.5)) == 3
        assert (
            "leaves out, of so many conversations: "
            "reasoning_content of assistant (2), name of user (1)"
        ) in caplog.text
        assert "skipped 1 of 4 rows" in caplog.text
        assert (
            "chats.jsonl:4: message 2: the chat template does not write its content" in caplog.text
        )
