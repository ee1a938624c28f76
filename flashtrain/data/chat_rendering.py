"""Render conversations with a tokenizer's chat template: Jinja, which
transformers runs in a sandbox."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.data.chat_messages import (
    Messages,
    Place,
    as_lists,
    forms,
    joined,
    with_placeholders,
)
from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer
from flashtrain.errors import UserError, first_line, needs_package

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it

Tools = list[Any] | None


class ChatRendering:
    """Renders conversations with a tokenizer's chat template, and encodes them. Raises
    UserError for invalid Jinja."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, *, contents: bool = True) -> None:
        self.tokenizer = tokenizer
        # Whether contents are lists of texts where the template writes no texts.
        self.contents = contents
        given = tokenizer.config.get("chat_template")
        self.templates: dict[str, Any] = {} if given is None else {"default": given}
        if isinstance(given, list):  # tokenizer_config.json may hold several
            self.templates = {
                str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)
            }
        for template in self.templates.values():
            _rendered(template, [], "is not valid Jinja")
        # The text of each special token: a file may hold an object with further
        # fields in its place.
        special = {name: one for name, one in tokenizer.config.items() if name.endswith("_token")}
        self.special = {
            name: one.get("content") if isinstance(one, dict) else one
            for name, one in special.items()
        }
        # In a rendered text, unlike in others, the spelling of a special token is that token:
        # this copy knows them.
        self.library = tokenizer.library_form()

    def text(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> str:
        """Render a conversation as text. If `prompt` is true, the generation
        prompt follows at its end."""
        return self._rendered(messages, tools, add_generation_prompt=prompt)[0][0]

    def marks(self, tools: Tools) -> bool:
        """Return whether the template marks what the assistant says ({% generation %})."""
        return MARKS_ANSWERS.search(self._template(tools)) is not None

    def marked(self, messages: Messages, tools: Tools) -> list[tuple[int, int]]:
        """Return the ranges (begin, end), in characters of the rendered text, that the template
        marks as said by the assistant."""
        return list(self._rendered(messages, tools, return_assistant_tokens_mask=True)[1][0])

    def accepted(self, messages: Messages, tools: Tools) -> tuple[Messages, set[Place]]:
        """Return the messages in that form (see chat_messages.forms) of which the template leaves
        out least, and what it leaves out (see `unwritten`).

        Raises UserError if the template leaves out a tool call.
        """
        found: list[tuple[set[Place], Messages]] = []
        ways = (joined, as_lists) if self.contents else (joined,)
        for form in (form for way in ways for form in forms(way(messages))):
            found.append((self.unwritten(form, tools), form))
            if not found[-1][0]:
                break
        lost, chosen = min(found, key=lambda one: len(one[0]))
        if calls := [at for at, key in lost if key == "tool_calls"]:
            line = "knows no tool calls"
            if "tool_calls" in self._template(tools):
                self.text(with_placeholders(chosen)[0], tools)  # which it may refuse
                line = "does not write its tool calls"
            raise UserError(
                f"message {min(calls) + 1}: the chat template {line}. "
                "Set data.chat_template=FILE, a template that writes tool calls."
            )
        return self._with_lists(chosen, messages, tools), lost

    def unwritten(self, messages: Messages, tools: Tools) -> set[Place]:
        """Return the contents and tool calls that the template does not write, or answers that it
        does not mark as the assistant's, as (index of the message, "content" or "tool_calls")."""
        changed, places = with_placeholders(messages, contents=self.contents)
        marks = self.marks(tools)
        try:
            (text,), spans = self._rendered(changed, tools, return_assistant_tokens_mask=marks)
        except UserError:
            return set(places.values())
        marked = "".join(text[begin:end] for begin, end in spans[0]) if marks else text
        answers = {(at, "content") for at, one in enumerate(messages) if one["role"] == "assistant"}
        return {
            place
            for word, place in places.items()
            if word not in (marked if place in answers else text)
        }

    def ignores(self, name: str, role: str, messages: Messages, tools: Tools) -> bool:
        """Return whether the rendered text stays the same when the field `name` is removed from all
        messages of a role."""
        last = max(
            at for at, one in enumerate(messages, start=1) if one["role"] == role and one.get(name)
        )
        shown = messages[:last]  # it may be written in the last message alone
        others = [
            {key: one[key] for key in one if key != name or one["role"] != role} for one in shown
        ]
        try:
            return self.text(others, tools) == self.text(shown, tools)
        except UserError:  # the template reads the field
            return False

    def _with_lists(self, texts: Messages, given: Messages, tools: Tools) -> Messages:
        """Return `texts`, the messages with joined contents, with the lists of texts in `given` put
        back if the template writes a list of one text as it writes the text alone."""
        at = [place for place, one in enumerate(given) if isinstance(one.get("content"), list)]
        single, lists = list(texts), list(texts)
        for place in at:
            (single[place],) = as_lists([texts[place]])
            lists[place] = {**texts[place], "content": given[place]["content"]}
        try:
            return lists if at and self.text(single, tools) == self.text(texts, tools) else texts
        except UserError:
            return texts

    def ids(self, texts: list[str]) -> list[np.ndarray]:
        """Encode each text as an int64 array. The spelling of a special token becomes that
        token."""
        found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def shared_text(self, one: str, other: str) -> int:
        """Return the length in characters of the common prefix of two texts, cut back to
        whole tokens of `one`."""
        if other.startswith(one):
            return len(one)
        ids, more = self.ids([one, other])
        begin = self.tokenizer.decode(ids[: shared_tokens(ids, more)])
        return len(begin) if one.startswith(begin) else len(os.path.commonprefix((one, other)))  # noqa: RUF071 - texts

    def added(self, text: str) -> list[str]:
        """List the tokens of a text, in order, that were added to the vocabulary,
        such as special tokens."""
        added = self.library.get_added_tokens_decoder()
        return [added[number].content for number in self.ids([text])[0].tolist() if number in added]

    def _template(self, tools: Tools) -> str:
        """Return the chat template; a tokenizer may have another template for conversations with
        tools."""
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        raise UserError(
            "the tokenizer has no chat template. Set data.chat_template=FILE, such as the one in "
            "docs/train/conversations.md, or data.tokenizer=FOLDER of one that has it (an export)."
        )

    def _rendered(
        self, messages: Messages, tools: Tools, **how: bool
    ) -> tuple[list[str], list[Any]]:
        return _rendered(
            self._template(tools),
            [messages],
            "does not accept it",
            tools=tools,
            **how,
            **self.special,
        )


def read_template(path: str | os.PathLike[str] | None) -> str | None:
    """Return the Jinja template in a file; None if `path` is None."""
    return None if path is None else Path(path).expanduser().read_text(encoding="utf-8-sig")


def _rendered(
    template: str, conversations: list[Messages], what: str, **given: Any
) -> tuple[list[str], list[Any]]:
    """Return (the text of each conversation, the ranges that the template marks, if requested).
    `what` says in the error's message what the template does wrong."""
    with needs_package("a chat template", "transformers", "hub"):
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template
    # transformers' own mask of tokens, before 5.24, loses answers whose first characters the
    # tokenizer trims off its offsets.
    render: Any = render_jinja_template  # its annotation names only one of its two results
    try:
        return render(conversations=conversations, chat_template=template, **given)
    # Python raises any of these for values that a template did not expect.
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise UserError(f"the chat template {what}: {first_line(error)}.") from error


def shared_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens in the common prefix of two arrays of tokens."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
