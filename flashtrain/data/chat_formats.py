"""Rows of ShareGPT's and of Alpaca's format, made into rows of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashtrain.data.chat_messages import Messages, messages_of
from flashtrain.errors import UserError
from flashtrain.files.json_files import parse_json

# Who speaks, by ShareGPT's `from`, as LLaMA-Factory reads it (whose `observation` is a tool's),
# and roles as they are.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system",
    "observation": "tool", "tool": "tool",
}  # fmt: skip
SPEAKERS = ("user", "assistant")
SHAREGPT = "conversations (ShareGPT's format): human is read as user and gpt as assistant"
ALPACA = (
    "instruction and output (Alpaca's format): "
    "read as user and assistant, input as a further line of the user's"
)


def with_messages(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return (the row with a key `messages`, a line on how it was read) for a row of either format;
    (the row unchanged, None) for any other.

    A column `system` becomes the system's message. Raises UserError if a ShareGPT message is
    from somebody unknown.
    """
    if row.get("messages") is not None or (
        row.get("prompt") is not None and row.get("completion") is not None
    ):
        return row, None
    if row.get("conversations") is not None:
        found, line = _sharegpt(row["conversations"]), SHAREGPT
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        found, line = _alpaca(row), ALPACA
    else:
        return row, None
    if row.get("system") and found[0]["role"] != "system":
        found = [{"role": "system", "content": row["system"]}, *found]
    return {**row, "messages": found}, line


def _sharegpt(given: Any) -> Messages:
    given = parse_json(given, "column conversations") if isinstance(given, str) else given
    renamed = []
    for number, message in enumerate(given if isinstance(given, list) else (), start=1):
        if isinstance(message, dict) and "from" in message:
            role = ROLES.get(message["from"])
            if role is None:
                raise UserError(
                    f"message {number} is from {message['from']!r}: "
                    f"expected one of {', '.join(ROLES)}."
                )
            others = {key: value for key, value in message.items() if key not in ("from", "value")}
            message = {**others, "role": role, "content": message.get("value")}
        renamed.append(message)
    return messages_of(renamed, "conversations")


def _alpaca(row: Mapping[str, Any]) -> Messages:
    """Return the messages of a row as LLaMA-Factory reads it: the pairs of `history`, then
    instruction and input, on a line each, as the user's message and `output` as the answer."""
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    pairs = [*(row.get("history") or ()), (question, row["output"])]
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(SPEAKERS, pair, strict=True)
    ]
