"""Conversations by a tokenizer's own chat template: their text, and which of their tokens are to be learnt.

A template is Jinja, which transformers renders in a sandbox. Where it marks what the assistant says ({% generation %}),
its marks are taken. Else an answer is found by rendering what comes before it, with the prompt for an answer, and what
ends with it: where the second departs from the first, the answer begins. What ends with it must begin the whole
conversation. A template that rewrites earlier turns (one that strips their thinking, say) fails that, and each answer
becomes a document of its own, of what the model is shown when it gives that answer.

Places are found in characters. The parts between them become tokens each by itself, as a model is given the tokens of
what comes before its answer. Together these must read as the whole text's do. Where they do not, since the tokenizer
begins every text with a space, the whole text's tokens are taken: what comes before a place must have tokens that begin
them, and a token across the place is learnt.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashtrain.data.bpe import clean, rust_threads
from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer
from flashtrain.data.text_files import one_line
from flashtrain.data.token_cache import GOES_ON, LABELLED
from flashtrain.data.tokenizers import Tokenizer, as_document
from flashtrain.errors import UserError, one_of
from flashtrain.files.foreign_files import parse_json, read_text

TRAIN_ON = ("assistant", "all")
MOST_TEMPLATE = 2**18  # characters; those of the models of 2026 have up to 20,000
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
POSSIBLE = "messages (a list of objects with role and content), prompt and completion, or text"
PROBE = {"role": "assistant", "content": "an answer"}

Messages = list[dict[str, Any]]


class Piece(NamedTuple):
    """A document to be: its text, and which of its characters are to be learnt, as (begin, end) in order.

    plain: of no template, so that the tokenizer's own begin and end of a text are put around it; the end is learnt.
    goes_on: it is of the same conversation as the piece before.
    """

    text: str
    learnt: tuple[tuple[int, int], ...]
    plain: bool = False
    goes_on: bool = False

    @property
    def places(self) -> list[int]:
        """Where, within the text, something to be learnt begins or ends, in order."""
        return sorted({place for span in self.learnt for place in span if 0 < place < len(self.text)})

    @property
    def ends(self) -> list[int]:
        """Where the parts between those places end."""
        return [*self.places, len(self.text)]

    @property
    def parts(self) -> list[str]:
        """The text between those places."""
        return [self.text[begin:end] for begin, end in pairwise([0, *self.ends])]


class ChatTemplate:
    """A tokenizer of a Hugging Face folder with its chat template; makes pieces of rows, and tokens of pieces.

    template: Jinja in place of the tokenizer's own. train_on: "assistant", or "all": every token. text_column: of rows
    of plain text.
    UserError: another tokenizer, one that has no end of a text, a template that is too long or no Jinja. Without any
    template it serves rows of plain text and of prompt and completion alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        train_on: str = "assistant",
        text_column: str = "text",
    ) -> None:
        one_of("data.train_on", train_on, TRAIN_ON)
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"chats need the tokenizer of the model that they train, and this is {tokenizer.describe()}. Possible: "
                "data.tokenizer=FOLDER, one of Hugging Face's."
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.text_column = text_column
        self.rewritten = 0  # conversations that became a document for each answer
        if template is not None:
            tokenizer.config["chat_template"] = template  # which is saved with the tokenizer
        self._templates = _templates(tokenizer.config.get("chat_template"))
        self._special = {name: _content(one) for name, one in tokenizer.config.items() if name.endswith("_token")}
        # In a template's text, unlike in other texts, what spells a special token is that token: a copy knows them.
        self._library = tokenizer.library_form()

    def key(self) -> str:
        """What decides the tokens, and which of them are learnt, beside the tokenizer's vocabulary."""
        parts = (1, self._templates, self._special, self.train_on, self.text_column)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def pieces(self, row: Mapping[str, Any]) -> list[Piece]:
        """The documents that a row becomes. UserError: what is wrong with it; it has nothing to learn."""
        if row.get("messages") is not None:
            found = self._conversation(_messages(row["messages"], "messages"), _tools(row), 0)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            found = self._pair(row["prompt"], row["completion"], _tools(row))
        elif isinstance(row.get(self.text_column), str):
            text = row[self.text_column]
            found = [Piece(text, ((0, len(text)),), plain=True)]
        else:
            raise UserError(f"it has {', '.join(map(str, row)) or 'nothing'}. Possible: {POSSIBLE}.")
        if self.train_on == "all":
            return [piece._replace(learnt=((0, len(piece.text)),)) for piece in found]
        return found

    def encode(self, pieces: Sequence[Piece]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each piece its tokens, int64, and their marks, uint8 (see token_cache). All are encoded at once."""
        parts = iter(self._ids([part for piece in pieces for part in piece.parts]))
        return [self._marked(piece, [next(parts) for _ in piece.ends]) for piece in pieces]

    def prompt(self, text: str) -> list[int]:
        """The tokens after which the model answers a user who says this. UserError: there is no template."""
        rendered = self._render([{"role": "user", "content": text}], None, prompt=True)
        return self._ids([rendered])[0].tolist()

    @property
    def end_ids(self) -> list[int]:
        """The ids of the tokens after which an answer is over, as far as they are learnt; none without a template."""
        end = self._end()
        return [] if end is None else [self._library.token_to_id(end)]

    def _end(self) -> str | None:
        """The first added token that is learnt behind an answer's own text; None where the template writes none."""
        try:
            (piece, *_) = self.pieces({"messages": [{"role": "user", "content": "ask"}, PROBE]})
        except UserError:  # it has no template, or one that takes no such conversation
            return None
        text = piece.text[: piece.learnt[-1][1]]
        return self._added(text[text.rfind(PROBE["content"]) :])

    def _added(self, text: str) -> str | None:
        """The first token of a text that is one of the tokenizer's added tokens."""
        added = self._library.get_added_tokens_decoder()
        return next((added[number].content for number in self._ids([text])[0].tolist() if number in added), None)

    def _marked(self, piece: Piece, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """parts: the tokens of each part by itself."""
        tokens = np.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        counts = {end: (count, count) for end, count in zip(piece.ends, ends, strict=True)}
        if len(parts) > 1 and (read := self.tokenizer.decode(tokens)) != piece.text:
            (whole,) = self._ids([piece.text])
            if read != self.tokenizer.decode(whole):  # a tokenizer that begins every text with a space
                tokens, counts = whole, self._counted(piece, whole)
        marks = np.zeros(len(tokens), dtype=np.uint8)
        for begin, end in piece.learnt:
            marks[counts[begin][0] if begin else 0 : counts[end][1]] = LABELLED
        if piece.plain:
            tokens = as_document(self.tokenizer, tokens)
            marks = np.concatenate((np.zeros(len(tokens) - len(marks) - 1), marks, [LABELLED])).astype(np.uint8)
        if piece.goes_on:
            marks[:1] |= GOES_ON
        return tokens, marks

    def _counted(self, piece: Piece, whole: np.ndarray) -> dict[int, tuple[int, int]]:
        """For each place how many of the text's tokens lie before it, without and with one that lies across."""
        counts = {len(piece.text): (len(whole), len(whole))}
        for place, ids in zip(piece.places, self._ids([piece.text[:place] for place in piece.places]), strict=True):
            shared = _shared(ids, whole)
            counts[place] = shared, shared + (shared < len(ids))
        return counts

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        with rust_threads():
            found = self._library.encode_batch_fast([clean(text) for text in texts], add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def _pair(self, prompt: object, completion: object, tools: list[Any] | None) -> list[Piece]:
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise UserError("its completion is empty. Possible: a text to learn.")
            text = prompt + completion
            return [Piece(text, ((len(prompt), len(text)),), plain=True)]
        before = _messages(prompt, "prompt")
        return self._conversation(before + _messages(completion, "completion"), tools, len(before))

    def _conversation(self, messages: Messages, tools: list[Any] | None, first: int) -> list[Piece]:
        """first: the first message whose answers count."""
        whole = self._render(messages, tools)
        answers = [at for at, one in enumerate(messages) if one["role"] == "assistant" and at >= first]
        if self.train_on == "all":
            return [Piece(whole, ())]
        if not answers:
            raise UserError("it has no message of the assistant to learn. Possible: one, or data.train_on=all.")
        if MARKS_ANSWERS.search(self._template(tools)):
            spans = self._marked_spans(messages, tools)
            begin = self._shared_text(self._render(messages[:first], tools), whole) if first else 0
            found = [Piece(whole, tuple(span for span in spans if begin <= span[0] < span[1]))]
        else:
            found = self._by_prefixes(messages, tools, answers, whole)
        if not any(piece.learnt for piece in found):
            raise UserError("the chat template shows nothing that the assistant says.")
        return found

    def _by_prefixes(
        self, messages: Messages, tools: list[Any] | None, answers: Sequence[int], whole: str
    ) -> list[Piece]:
        ends, spans = [], []
        for at in answers:
            # Of a conversation that the assistant begins, its header is learnt too: templates refuse to render nothing.
            before = self._render(messages[:at], tools, prompt=True) if at else ""
            end = whole if at == len(messages) - 1 else self._render(messages[: at + 1], tools)
            if not whole.startswith(end):
                # A template may close what ends here: with the prompt for a further answer it does not.
                end = end[: self._shared_text(end, self._render(messages[: at + 1], tools, prompt=True))]
            ends.append(end)
            spans.append((self._shared_text(before, end), len(end)))
        if all(whole.startswith(end) for end in ends):
            return [Piece(whole, tuple(span for span in spans if span[0] < span[1]))]
        self.rewritten += 1
        found = [Piece(end, (span,)) for end, span in zip(ends, spans, strict=True) if span[0] < span[1]]
        return [piece._replace(goes_on=at > 0) for at, piece in enumerate(found)]

    def _shared_text(self, one: str, other: str) -> int:
        """How many characters both begin with, in whole tokens where they part."""
        if other.startswith(one):
            return len(one)
        ids, more = self._ids([one, other])
        begin = self.tokenizer.decode(ids[: _shared(ids, more)])
        return len(begin) if one.startswith(begin) else len(os.path.commonprefix((one, other)))  # noqa: RUF071 - texts

    def _template(self, tools: list[Any] | None) -> str:
        """The template's text; a tokenizer may have one of its own for tools."""
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        raise UserError("the tokenizer has no chat template. Possible: data.chat_template=FILE, a Jinja template.")

    def _render(self, messages: Messages, tools: list[Any] | None, *, prompt: bool = False) -> str:
        return self._rendered(messages, tools, add_generation_prompt=prompt)[0][0]

    def _marked_spans(self, messages: Messages, tools: list[Any] | None) -> list[tuple[int, int]]:
        return list(self._rendered(messages, tools, return_assistant_tokens_mask=True)[1][0])

    def _rendered(self, messages: Messages, tools: list[Any] | None, **how: bool) -> tuple[list[str], list[Any]]:
        return _rendered(self._template(tools), [messages], "does not take it", tools=tools, **how, **self._special)


def read_template(path: str | os.PathLike[str] | None) -> str | None:
    """The Jinja template in a file. UserError: none that can be read, or too long a one."""
    return None if path is None else read_text(Path(path).expanduser(), MOST_TEMPLATE)


def _templates(given: object) -> dict[str, str]:
    """A tokenizer's templates by name, "default" where there is one. UserError: too long a one, or no Jinja."""
    if isinstance(given, list):  # as tokenizer_config.json has several
        found: dict[str, Any] = {str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)}
    else:
        found = {} if given is None else {"default": given}
    for text in found.values():
        if not isinstance(text, str) or len(text) > MOST_TEMPLATE:
            raise UserError(f"the chat template is no text of at most {MOST_TEMPLATE:,} characters.")
        _rendered(text, [], "is no Jinja")
    return found


def _rendered(template: str, conversations: list[Messages], what: str, **given: Any) -> tuple[list[str], list[Any]]:
    """Of each conversation its text, and what in it the template marks, as lists of (begin, end), where asked for.

    The library's own mask of tokens loses answers whose first characters its tokenizer trims off its offsets.
    what: of the template, where it fails, in words.
    """
    try:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise UserError("chat templates need `transformers`; install it with: pip install 'flashtrain[hub]'") from error
    render: Any = render_jinja_template  # its annotation names one of the two that it returns
    try:
        return render(conversations=conversations, chat_template=template, **given)
    # Whatever Python raises of values that a template did not expect.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the chat template {what}: {one_line(error)}.") from error


def _content(token: object) -> object:
    """A special token's text, which a file may give with how it is found."""
    return token.get("content") if isinstance(token, dict) else token


def _messages(given: object, column: str) -> Messages:
    """Messages as a template takes them: what is null is left out, and a call's arguments are an object."""
    given = parse_json(given, f"its {column}") if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise UserError(f"its {column} are no list of messages. Possible: {POSSIBLE}.")
    found = []
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {number} of its {column} has no role. Possible: an object with role and content.")
        # Templates ask whether a key is there at all, and write "None" where it is null.
        one = {key: value for key, value in message.items() if value is not None}
        for call in one["tool_calls"] if isinstance(one.get("tool_calls"), list) else []:
            called = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(called, dict) and isinstance(called.get("arguments"), str):
                called["arguments"] = parse_json(called["arguments"], f"message {number}: a call's arguments")
        found.append(one)
    return found


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    given = row.get("tools")
    given = parse_json(given, "its tools") if isinstance(given, str) and given else given
    if given is not None and (not isinstance(given, list) or not all(isinstance(one, dict) for one in given)):
        raise UserError("its tools are no list of objects. Possible: a JSON schema for each.")
    return given or None


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
