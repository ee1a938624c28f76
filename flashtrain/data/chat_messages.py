"""Read the messages and tools of a row, and change them to the forms that chat templates accept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import product
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.json_files import parse_json

EXPECTED = (
    "messages (a list of objects with role and content), prompt and completion, "
    "conversations (from and value), instruction and output, or text"
)

Messages = list[dict[str, Any]]
Place = tuple[int, str]  # index of a message, and a key of it


def messages_of(given: object, column: str) -> Messages:
    """Return the list of messages in a column's value, which may be JSON text; keys whose value is
    null are left out.

    Raises UserError, which names the column, if the value does not hold messages.
    """
    given = parse_json(given, f"column {column}") if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise UserError(f"column {column} is not a list of messages: expected {EXPECTED}.")
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"message {number} in column {column} has no role: expected {{role: ..., content: "
                f"...}}."
            )
    # Templates test whether a key exists, and write "None" if its value is null.
    return [
        {key: value for key, value in message.items() if value is not None} for message in given
    ]


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the column `tools` of a row, which may be JSON text; None if the row has none. Raises
    UserError if it is not a list of objects."""
    given = row.get("tools")
    given = parse_json(given, "column tools") if isinstance(given, str) and given else given
    if given is not None and (
        not isinstance(given, list) or not all(isinstance(one, dict) for one in given)
    ):
        raise UserError(
            "column tools is not a list of objects: expected a JSON schema for each tool."
        )
    return given or None


def joined(messages: Messages) -> Messages:
    """Return the messages with each content that is a list of text parts joined to one text. Raises
    UserError for a part of another type."""
    found = list(messages)
    for at, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UserError(
                    f"message {at + 1}: "
                    f"its content has a part of type {kind}, expected parts of type text."
                )
        found[at] = {**message, "content": "".join(part["text"] for part in content)}
    return found


def forms(messages: Messages) -> Iterator[Messages]:
    """Yield copies of the messages, one for each form in which a template may expect tool calls,
    the usual form first.

    The forms differ in two ways: arguments of a call are an object or JSON text, and a missing
    content stays missing or becomes "" or null.
    """
    if not any(_calls(messages)):
        yield messages
        return
    contents: tuple[dict[str, Any], ...] = ({}, {"content": ""}, {"content": None})
    for content, as_text in product(contents, (False, True)):
        found = deepcopy([{**content, **one} if one.get("tool_calls") else one for one in messages])
        for at, called in _calls(found):
            arguments = called.get("arguments")
            if isinstance(arguments, str) and not as_text:
                called["arguments"] = parse_json(arguments, f"message {at + 1}: a call's arguments")
            elif isinstance(arguments, dict) and as_text:
                called["arguments"] = json.dumps(arguments, ensure_ascii=False)
        yield found


def as_lists(messages: Messages) -> Messages:
    """Return the messages with each content that is a text as a list of one text part."""
    found = deepcopy(messages)
    for message in found:
        if isinstance(text := message.get("content"), str):
            message["content"] = [{"type": "text", "text": text}]
    return found


def with_placeholders(
    messages: Messages, *, contents: bool = True
) -> tuple[Messages, dict[str, Place]]:
    """Replace the name and arguments of each tool call, and (if `contents`) each content, by words
    whose absence in a rendered text shows that the template leaves them out.

    Returns:
        The changed messages, and for each placeholder its place: the index of the message, and
        "content" or "tool_calls".
    """
    found, places = [deepcopy(message) for message in messages], {}
    for at, message in enumerate(found):
        content = message.get("content")
        if contents and content and isinstance(content, str | list):
            word = f"content_{at}_word"
            message["content"] = (
                word if isinstance(content, str) else [{"type": "text", "text": word}]
            )
            places[word] = at, "content"
    for number, (at, called) in enumerate(_calls(found)):
        word = f"call_{number}_word"
        arguments = {word: word}
        called |= {
            "name": word,
            "arguments": json.dumps(arguments)
            if isinstance(called.get("arguments"), str)
            else arguments,
        }
        places[word] = at, "tool_calls"
    return found, places


def _calls(messages: Messages) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield for each tool call the index of its message, and the call's function: a dict with name
    and arguments, which may be changed."""
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            called = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(called, dict):
                yield at, called
