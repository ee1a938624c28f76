"""Render conversations with a tokenizer's chat template: Jinja, which transformers runs in a sandbox."""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.data.chat_messages import Messages, as_lists, forms, joined, shape_of, with_placeholders
from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer
from flashtrain.errors import UserError, first_line, needs_package

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it

Tools = list[Any] | None


class ChatRendering:
    """Renders conversations with a tokenizer's chat template, and encodes them. Raises UserError for invalid Jinja."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, *, lists: bool = True) -> None:
        self.tokenizer = tokenizer
        self.lists = lists  # whether contents become lists of texts where the template does not write them as texts
        self._known: dict[tuple[Any, ...], Any] = {}  # what the template does to conversations of one shape
        given = tokenizer.config.get("chat_template")
        self.templates: dict[str, Any] = {} if given is None else {"default": given}
        if isinstance(given, list):  # tokenizer_config.json may hold several
            self.templates = {str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)}
        for template in self.templates.values():
            _rendered(template, [], "is not valid Jinja")
        # The text of each special token: a file may hold an object with further fields in its place.
        special = {name: one for name, one in tokenizer.config.items() if name.endswith("_token")}
        self.special = {name: one.get("content") if isinstance(one, dict) else one for name, one in special.items()}
        # In a rendered text, unlike in others, the spelling of a special token is that token: this copy knows them.
        self.library = tokenizer.library_form()

    def text(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> str:
        """Render a conversation as text. If `prompt` is true, the generation prompt follows at its end."""
        return self._rendered(messages, tools, add_generation_prompt=prompt)[0][0]

    def marks(self, tools: Tools) -> bool:
        """Return whether the template marks what the assistant says ({% generation %})."""
        return MARKS_ANSWERS.search(self._template(tools)) is not None

    def marked(self, messages: Messages, tools: Tools) -> list[tuple[int, int]]:
        """List what the template marks as said by the assistant, as (begin, end) in characters of the rendered text."""
        return list(self._rendered(messages, tools, return_assistant_tokens_mask=True)[1][0])

    def accepted(self, messages: Messages, tools: Tools) -> Messages:
        """Return the messages in the first of `forms` that the template writes, or else accepts.

        Raises UserError if it accepts none.
        """
        refused, accepted, texts = [], [], joined(messages)
        for form in chain(forms(texts), forms(as_lists(messages)) if self.lists else ()):
            try:
                written = not self.unwritten(form, tools)
            except UserError as error:
                refused.append(error)
                continue
            accepted.append(self._with_lists(form, messages, tools))
            if written or not self.lists:
                return accepted[-1]
        if accepted:
            return accepted[0]
        if "tool_calls" not in self._template(tools):
            raise UserError("the chat template knows no tool calls. Set data.chat_template=FILE, one that does.")
        raise refused[0]

    def unwritten(self, messages: Messages, tools: Tools) -> set[int]:
        """Return the numbers, from 1, of messages whose content the template leaves out, or of an answer unmarked.

        Raises UserError if it leaves out a tool call.
        """
        key = ("unwritten", bool(tools), shape_of(messages))
        if key not in self._known:
            changed, words = with_placeholders(messages)
            try:
                text = self.text(changed, tools)
                spans = self.marked(changed, tools) if self.marks(tools) else [(0, len(text))]
            except UserError:
                if any(word.startswith("call") for word in words):
                    raise
                text, spans = "", []
            said = {"assistant": "".join(text[begin:end] for begin, end in spans)}
            lost = set()
            for word, number in words.items():
                if word.startswith("content") and word not in said.get(messages[number - 1]["role"], text):
                    lost.add(number)
                elif word not in text:
                    line = f"message {number}: the chat template does not write its tool calls"
                    raise UserError(f"{line}. Set data.chat_template=FILE, one that does.")
            self._known[key] = lost
        return self._known[key]

    def ignores(self, name: str, role: str, messages: Messages, tools: Tools) -> bool:
        """Return whether another value of this field, in a role's messages, gives the same text."""
        key = (name, role, bool(tools), shape_of(messages))
        if key not in self._known:
            last = max(at for at, one in enumerate(messages, start=1) if one["role"] == role and one.get(name))
            others = [dict(one) for one in messages[:last]]  # it may be written in the last message alone
            for one in others:
                if one["role"] == role and isinstance(one.get(name), str):
                    one[name] += "x"
                elif one["role"] == role:
                    one.pop(name, None)
            try:
                self._known[key] = self.text(others, tools) == self.text(messages[:last], tools)
            except UserError:  # the template reads the field
                self._known[key] = False
        return self._known[key]

    def _with_lists(self, texts: Messages, given: Messages, tools: Tools) -> Messages:
        """The messages with the given lists of texts, if the template writes a list of one text like the text."""
        lists, single, one_list = list(texts), list(texts), as_lists(texts)
        for at in [at for at, one in enumerate(given) if isinstance(one.get("content"), list)]:
            lists[at], single[at] = {**texts[at], "content": given[at]["content"]}, one_list[at]
        try:
            return lists if lists != texts and self.text(single, tools) == self.text(texts, tools) else texts
        except UserError:
            return texts

    def ids(self, texts: list[str]) -> list[np.ndarray]:
        """Encode each text as an int64 array. The spelling of a special token is read as that token."""
        found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def shared_text(self, one: str, other: str) -> int:
        """Return the length in characters of the common prefix of two texts, cut back to whole tokens of `one`."""
        if other.startswith(one):
            return len(one)
        ids, more = self.ids([one, other])
        begin = self.tokenizer.decode(ids[: shared_tokens(ids, more)])
        return len(begin) if one.startswith(begin) else len(os.path.commonprefix((one, other)))  # noqa: RUF071 - texts

    def added(self, text: str) -> list[str]:
        """List the tokens of a text, in order, that were added to the vocabulary, such as special tokens."""
        added = self.library.get_added_tokens_decoder()
        return [added[number].content for number in self.ids([text])[0].tolist() if number in added]

    def _template(self, tools: Tools) -> str:
        """The template's text; a tokenizer may have another one for conversations with tools."""
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        raise UserError("the tokenizer has no chat template. Set data.chat_template=FILE, a Jinja template.")

    def _rendered(self, messages: Messages, tools: Tools, **how: bool) -> tuple[list[str], list[Any]]:
        return _rendered(self._template(tools), [messages], "does not accept it", tools=tools, **how, **self.special)


def read_template(path: str | os.PathLike[str] | None) -> str | None:
    """Return the Jinja template in a file; None if `path` is None."""
    return None if path is None else Path(path).expanduser().read_text(encoding="utf-8-sig")


def _rendered(template: str, conversations: list[Messages], what: str, **given: Any) -> tuple[list[str], list[Any]]:
    """The text of each conversation, and the marked ranges if requested. what: for the error's message."""
    with needs_package("a chat template", "transformers", "hub"):
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template
    # transformers' own mask of tokens, before 5.24, loses answers whose first characters the tokenizer trims off its
    # offsets.
    render: Any = render_jinja_template  # its annotation names only one of its two results
    try:
        return render(conversations=conversations, chat_template=template, **given)
    # Python raises any of these for values that a template did not expect.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the chat template {what}: {first_line(error)}.") from error


def shared_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens in the common prefix of two arrays of tokens."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
