"""Tokenize conversations with the tokenizer's own chat template, and mark the
tokens that get labels."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from flashtrain.data.chat_answers import ChatAnswers, Piece
from flashtrain.data.chat_formats import with_messages
from flashtrain.data.chat_messages import EXPECTED, Messages, Place, messages_of, tools_of
from flashtrain.data.chat_rendering import ChatRendering, Tools, shared_tokens
from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer
from flashtrain.data.token_cache import GOES_ON, LABELLED
from flashtrain.data.tokenizers import as_document
from flashtrain.errors import UserError, one_of
from flashtrain.settings import options

TRAIN_ON = get_args(options.TrainOn)
# Fields of messages that are looked after elsewhere.
READ = ("role", "content", "tool_calls", "weight")


@dataclass(eq=False)
class ChatTemplate:
    """A Hugging Face tokenizer with its chat template: turns rows into documents, and these
    into tokens and labels.

    Without a template, only rows of plain text and of prompt and completion can be read. Raises
    UserError if the tokenizer is of another kind, or the template is not valid Jinja.
    """

    tokenizer: Any  # a HuggingFaceTokenizer
    template: str | None = None  # Jinja that replaces the tokenizer's own template
    train_on: str = "assistant"  # which tokens get labels, "assistant" or "all"
    text_column: str = "text"  # of rows of plain text
    # False: learn whatever the template writes, as runs begun before this check.
    check_answers: bool = True

    def __post_init__(self) -> None:
        one_of("data.train_on", self.train_on, TRAIN_ON)
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise UserError(
                "conversations need the tokenizer of the model that is trained, and this is "
                f"{self.tokenizer.describe()}. Set data.tokenizer=FOLDER, the Hugging Face "
                "folder of that model."
            )
        self.endless = 0  # conversations without a label that teaches the model to stop
        self.rewritten = 0  # conversations that are split into one document per answer
        # Conversations, by what the template does not write.
        self.left_out: Counter[str] = Counter()
        # Rows of other formats, by the line that says how they are read.
        self.formats: Counter[str] = Counter()
        if self.template is not None:
            self.tokenizer.config["chat_template"] = self.template  # it is saved with the tokenizer
        self._rendering = ChatRendering(self.tokenizer, contents=self.check_answers)
        self.answers = ChatAnswers(self._rendering)

    def key(self) -> str:
        """Return a hash of everything that decides tokens and labels, except the
        tokenizer's vocabulary."""
        version = 4 if self.check_answers else 3
        parts: tuple[Any, ...] = (version, self._rendering.templates, self._rendering.special)
        parts += (
            self.train_on,
            self.text_column,
            *(("letters",) if self.tokenizer.letters else ()),
        )
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def pieces(self, row: Mapping[str, Any]) -> list[Piece]:
        """Make the documents (Pieces, not yet tokenized) of a row. Raises UserError if the row is
        malformed, or has nothing to learn."""
        row, format_line = with_messages(row)
        if format_line is not None:
            self.formats[format_line] += 1
        if row.get("messages") is not None:
            found = self._conversation(messages_of(row["messages"], "messages"), tools_of(row), 0)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            found = self._pair(row["prompt"], row["completion"], tools_of(row))
        elif isinstance(row.get(self.text_column), str):
            text = row[self.text_column]
            found = [Piece(text, ((0, len(text)),), plain=True)]
        else:
            raise UserError(
                f"the row has columns {', '.join(map(str, row)) or 'none'}: expected {EXPECTED}."
            )
        if self.train_on == "all":
            return [piece._replace(learnt=((0, len(piece.text)),)) for piece in found]
        return found

    def encode(self, pieces: Sequence[Piece]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode documents (Pieces): one call of the tokenizer for plain texts, and one for those
        that a template rendered.

        Returns:
            For each piece its token ids, int64, and their marks, uint8: LABELLED on each label,
            GOES_ON on the first token of a piece that continues the conversation of the piece
            before (token_cache).
        """
        parts = {
            plain: [part for one in pieces if one.plain == plain for part in one.parts]
            for plain in (False, True)
        }
        ids = {plain: iter(self._ids(texts, plain)) for plain, texts in parts.items()}
        return [
            self._marked(piece, [next(ids[piece.plain]) for _ in piece.ends]) for piece in pieces
        ]

    def _ids(self, texts: list[str], plain: bool) -> list[np.ndarray]:
        return self.tokenizer.encode_batch(texts) if plain else self._rendering.ids(texts)

    def prompt(self, row: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a row's messages and the generation prompt. Raises
        UserError for a malformed row."""
        messages, tools = messages_of(row.get("messages"), "messages"), tools_of(row)
        messages, _ = self._rendering.accepted(messages, tools)
        return self._rendering.ids([self._rendering.text(messages, tools, prompt=True)])[0].tolist()

    def _conversation(self, messages: Messages, tools: Tools, first: int) -> list[Piece]:
        """Return the documents that a conversation is learned from: one, or several where the
        template writes an answer otherwise once more messages follow. `first`: the index of the
        first message that may get labels."""
        messages, unwritten = self._rendering.accepted(messages, tools)
        whole = self._rendering.text(messages, tools)
        answers, found = [], [Piece(whole, ())]
        if self.train_on != "all":
            answers = [
                at for at, one in enumerate(messages) if one["role"] == "assistant" and at >= first
            ]
            answers = [
                at for at in answers if not self.check_answers or messages[at].get("weight", 1)
            ]
            if not answers:
                raise UserError(
                    "no message to learn has the role assistant and a weight above 0. "
                    "Add one, or set data.train_on=all."
                )
            found = self.answers.pieces(messages, tools, answers, whole, first)
            if not any(piece.learnt for piece in found):
                raise UserError(
                    "the chat template leaves out all answers. "
                    "Set another one, data.chat_template=FILE."
                )
        if self.check_answers:
            self._check(messages, tools, answers, found, unwritten)
        self.endless += self.train_on != "all" and self.answers.endless
        self.rewritten += len(found) > 1
        return found

    def _check(
        self,
        messages: Messages,
        tools: Tools,
        answers: Sequence[int],
        pieces: Sequence[Piece],
        unwritten: set[Place],
    ) -> None:
        """Count the fields that the template leaves out, in `left_out`. Raises UserError if it
        leaves out the content of an answer."""
        learnt = _bare(
            "".join(piece.text[begin:end] for piece in pieces for begin, end in piece.learnt)
        )
        lost = {f"content of {messages[at]['role']}" for at, _ in unwritten if at not in answers}
        for at in answers:
            if (at, "content") in unwritten and _bare(messages[at].get("content")) not in learnt:
                line = (
                    f"message {at + 1}: "
                    "the chat template does not write its content where it is learned"
                )
                raise UserError(
                    f"{line}. Set data.chat_template=FILE, a template that does, "
                    "or remove the content."
                )
        fields = {
            (name, one["role"])
            for one in messages
            for name in one
            if one[name] and name not in READ
        }
        lost |= {
            f"{name} of {role}"
            for name, role in fields
            if self._rendering.ignores(name, role, messages, tools)
        }
        self.left_out.update(lost)

    def _marked(self, piece: Piece, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and marks of a piece; `parts` are the tokens of each text in
        piece.parts."""
        # The parts are tokenized one by one, as a model receives the tokens of a prompt before its
        # answer. If together they decode to another text than the whole does, because the tokenizer
        # begins every text with a space, the tokens of the whole text are used: those before a
        # bound are a prefix of them, and one across it gets a label.
        tokens = np.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        counts = {end: (count, count) for end, count in zip(piece.ends, ends, strict=True)}
        if len(parts) > 1 and (read := self.tokenizer.decode(tokens)) != piece.text:
            (whole,) = self._ids([piece.text], piece.plain)
            if read != self.tokenizer.decode(whole):
                tokens, counts = whole, self._counted(piece, whole)
        marks = np.zeros(len(tokens), dtype=np.uint8)
        for begin, end in piece.learnt:
            marks[counts[begin][0] if begin else 0 : counts[end][1]] = LABELLED
        if piece.plain:
            tokens = as_document(self.tokenizer, tokens)
            marks = np.concatenate(
                (np.zeros(len(tokens) - len(marks) - 1), marks, [LABELLED])
            ).astype(np.uint8)
        if piece.goes_on:
            marks[:1] |= GOES_ON
        return tokens, marks

    def _counted(self, piece: Piece, whole: np.ndarray) -> dict[int, tuple[int, int]]:
        """Return, for each position in piece.ends, the number of tokens of `whole` before it:
        (without, with) a token that lies across it."""
        *places, last = piece.ends
        counts = {last: (len(whole), len(whole))}
        before = self._ids([piece.text[:place] for place in places], piece.plain)
        for place, ids in zip(places, before, strict=True):
            shared = shared_tokens(ids, whole)
            counts[place] = shared, shared + (shared < len(ids))
        return counts

    def _pair(self, prompt: object, completion: object, tools: Tools) -> list[Piece]:
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise UserError("the row's completion is empty: expected a text to learn.")
            text = prompt + completion
            return [Piece(text, ((len(prompt), len(text)),), plain=True)]
        before = messages_of(prompt, "prompt")
        return self._conversation(
            before + messages_of(completion, "completion"), tools, len(before)
        )


def _bare(content: Any) -> str:
    """Return the text of a message's content without white space, which templates change."""
    parts = content if isinstance(content, list) else [{"text": str(content or "")}]
    return "".join("".join(part["text"] for part in parts).split())
