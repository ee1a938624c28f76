"""Rows of ShareGPT's and of Alpaca's format become the same tokens and labels as the
messages that they mean."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from chat_folders import CHATML, save_tokenizer_folder

from flashtrain.data.chat_formats import with_messages
from flashtrain.data.chat_source import ChatFiles, ChatSource
from flashtrain.data.chat_template import ChatTemplate
from flashtrain.data.tokenizers import huggingface_tokenizer
from flashtrain.errors import UserError


def said(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def shared(*pairs: tuple[str, str], **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text} for who, text in pairs], **columns}


TALK = said(("user", "Hi"), ("assistant", "Hello."))
SYSTEM = said(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."))
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
ADDED = said(("user", "Add.\n1 and 2"), ("assistant", "3"))
ROWS = [
    (shared(("human", "Hi"), ("gpt", "Hello."), id="a1"), TALK),
    (shared(("user", "Hi"), ("assistant", "Hello.")), TALK),
    (
        {"conversations": json.dumps(shared(("human", "Hi"), ("gpt", "Hello."))["conversations"])},
        TALK,
    ),
    ({"conversations": TALK["messages"]}, TALK),
    (
        shared(("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello."), system="not shown"),
        SYSTEM,
    ),
    (shared(("human", "Hi"), ("gpt", "Hello."), system="Be brief."), SYSTEM),
    (ALPACA, ADDED),
    ({**ALPACA, "text": "Below is an instruction"}, ADDED),  # as tatsu-lab/alpaca has it
    ({**ALPACA, "input": ""}, said(("user", "Add."), ("assistant", "3"))),
    (
        {**ALPACA, "system": "Be brief."},
        said(("system", "Be brief."), ("user", "Add.\n1 and 2"), ("assistant", "3")),
    ),
    (
        {**ALPACA, "history": [["Hi", "Hello."]]},
        said(
            ("user", "Hi"), ("assistant", "Hello."), ("user", "Add.\n1 and 2"), ("assistant", "3")
        ),
    ),
    ({**TALK, "conversations": []}, TALK),
    ({"prompt": "1+1=", "completion": "2", **ALPACA}, {"prompt": "1+1=", "completion": "2"}),
]


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate(
        huggingface_tokenizer(save_tokenizer_folder(tmp_path / "tokenizer", CHATML))
    )


@pytest.mark.parametrize(("row", "meant"), ROWS)
def test_a_row_has_the_tokens_and_labels_of_the_messages_that_it_means(
    row: dict[str, Any], meant: dict[str, Any], template: ChatTemplate
) -> None:
    for (tokens, marks), (expected, expected_marks) in zip(
        template.encode(template.pieces(row)), template.encode(template.pieces(meant)), strict=True
    ):
        assert (tokens.tolist(), marks.tolist()) == (expected.tolist(), expected_marks.tolist())


def test_a_line_says_how_rows_of_another_format_are_read(
    template: ChatTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows = [ROWS[0][0], ALPACA, ALPACA, TALK]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert (
        sum(
            len(one.tokens)
            for one in ChatSource(ChatFiles(tmp_path), template).encoded(template.tokenizer)
        )
        == 4
    )
    lines = [line for line in caplog.messages if "format" in line]
    assert [line.split(" (")[0] for line in lines] == [
        "1 rows have conversations",
        "2 rows have instruction and output",
    ]


@pytest.mark.parametrize("who", ["function_call", "narrator"])
def test_a_message_from_somebody_unknown_is_refused(who: str) -> None:
    with pytest.raises(UserError, match=f"message 2 is from '{who}': expected one of human, "):
        with_messages(shared(("human", "Hi"), (who, "?")))
