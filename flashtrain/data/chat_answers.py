"""Find the characters of a rendered conversation that get labels: the answers, as the
model would write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from flashtrain.data.chat_messages import Messages
from flashtrain.data.chat_rendering import ChatRendering, Tools
from flashtrain.errors import UserError

# A conversation that shows where a template ends answers.
ASK = {"role": "user", "content": "ask"}
ANSWER = {"role": "assistant", "content": "an answer"}
MORE = "more"
FOLLOWING = ("user", "tool", "system")  # roles whose marker may end an answer


class Piece(NamedTuple):
    """A text that becomes one document, a whole conversation or one answer after its prompt, with
    the characters that get labels."""

    text: str
    # The (begin, end) ranges of the characters that get labels, in order.
    learnt: tuple[tuple[int, int], ...]
    # Made without a template: begin and end of text are added, and the end gets a label.
    plain: bool = False
    # Whether the piece belongs to the same conversation as the piece before it.
    goes_on: bool = False

    @property
    def ends(self) -> list[int]:
        """The character position at which each of `parts` ends, ascending."""
        inner = {place for span in self.learnt for place in span if 0 < place < len(self.text)}
        return [*sorted(inner), len(self.text)]

    @property
    def parts(self) -> list[str]:
        """The text cut where a labelled range (`learnt`) begins or ends."""
        return [self.text[begin:end] for begin, end in pairwise([0, *self.ends])]


class Answer(NamedTuple):
    """An answer of the assistant, with the text that the model reads before it."""

    text: str
    begin: int  # where in the text the answer begins
    # Where it ends in the text of the whole conversation; None: the text there is different.
    within: int | None


@dataclass
class ChatAnswers:
    """Finds the answers of conversations in the text that a chat template renders.

    If the template marks what the assistant says ({% generation %}), these marks are used.
    Otherwise the conversation is rendered twice: up to the answer, with a generation prompt, and
    including the answer. The answer begins where the two texts differ. If the second text is a
    prefix of the whole conversation, the conversation is one document. It is no prefix if the
    template rewrites earlier turns (for example, strips their thinking); each answer then becomes a
    document of its own, with the prompt that the model sees for that answer. If the template does
    not write an end of an answer (GLM), the marker of the next role gets a label.
    """

    rendering: ChatRendering

    def pieces(
        self,
        messages: Messages,
        tools: Tools,
        answers: Sequence[int],
        whole: str,
        first: int = 0,
        *,
        close: bool = True,
    ) -> list[Piece]:
        """Make the documents of a conversation: one, or one for each answer.

        Args:
            messages, tools: The conversation, and the tools that the assistant may call.
            answers: Indices of the messages that get labels.
            whole: The conversation as the template renders it.
            first: Index of the first message that may get labels.
            close: Whether the next role's marker gets a label if the template
                writes no end of an answer.

        Raises:
            UserError: An answer cannot be separated from the text before it.
        """
        closes = [self._close(messages, at) if close else "" for at in answers]
        own = [self._answer(messages, tools, at, whole) for at in answers]
        if all(one.within is not None for one in own):
            return [self._together(messages, tools, own, closes, whole, first)]
        each = zip(answers, own, closes, strict=True)
        found = [self._alone(messages[: at + 1], tools, one, close) for at, one, close in each]
        found = [piece for piece in found if piece.learnt]
        return [piece._replace(goes_on=place > 0) for place, piece in enumerate(found)]

    @cached_property
    def end_ids(self) -> list[int]:
        """The ids of the tokens that end an answer and get labels, none without a template;
        generation stops after any of them."""
        ends = self._end or "".join(self._markers.values())
        found = map(self.rendering.library.token_to_id, dict.fromkeys(self.rendering.added(ends)))
        return [number for number in found if number is not None]

    @property
    def endless(self) -> bool:
        """Whether no label teaches the model to stop after an answer."""
        return not self._end and "user" not in self._markers

    @cached_property
    def _end(self) -> str:
        """The token that the template writes to end an answer, such as <|im_end|>; "" if it writes
        none."""
        try:
            talk, _ = self.rendering.accepted([ASK, ANSWER, ASK], None)
            found = self.pieces(talk, None, [1], self.rendering.text(talk, None), close=False)
        except UserError:  # no template, or one that does not accept this conversation
            return ""
        learnt = "".join(piece.text[begin:end] for piece in found for begin, end in piece.learnt)
        return "".join(self.rendering.added(learnt.rpartition(ANSWER["content"])[2])[-1:])

    @cached_property
    def _markers(self) -> dict[str, str]:
        """For each role the text that the template writes between an answer and a message of that
        role, up to and including the first special (added) token in it."""
        found = {}
        for role in FOLLOWING:
            try:
                if self.rendering.marks(None):  # the marks decide what gets labels
                    break
                talk, _ = self.rendering.accepted(
                    [ASK, ANSWER, {"role": role, "content": MORE}], None
                )
                text = self.rendering.text(talk, None)
            except UserError:
                continue
            between = text.rpartition(MORE)[0].rpartition(ANSWER["content"])[2]
            for marker in self.rendering.added(between)[:1]:
                found[role] = between[: between.find(marker) + len(marker)]
        return found

    def _close(self, messages: Messages, at: int) -> str:
        """Return the marker of the role that follows message `at`, which gets a label if the
        template writes no end of an answer; else an empty text."""
        if self._end:
            return ""
        last = "tool" if messages[at].get("tool_calls") else "user"
        return self._markers.get(messages[at + 1]["role"] if at + 1 < len(messages) else last, "")

    def _together(
        self,
        messages: Messages,
        tools: Tools,
        own: Sequence[Answer],
        closes: Sequence[str],
        whole: str,
        first: int,
    ) -> Piece:
        if self.rendering.marks(tools):
            marked = self.rendering.marked(messages, tools)
            begin = (
                self.rendering.shared_text(self.rendering.text(messages[:first], tools), whole)
                if first
                else 0
            )
            marked = [span for span in marked if begin <= span[0] < span[1]]
            # Others are not learned.
            if len(own) < sum(one["role"] == "assistant" for one in messages[first:]):
                marked = [
                    (a, b)
                    for a, b in marked
                    if any(a < int(one.within or 0) and one.begin < b for one in own)
                ]
            return Piece(whole, tuple(marked))
        if own[-1].within == len(whole):
            whole += closes[-1]
        ends = [int(one.within or 0) for one in own]
        ends = [
            end + len(close) * whole.startswith(close, end)
            for end, close in zip(ends, closes, strict=True)
        ]
        spans = [(one.begin, end) for one, end in zip(own, ends, strict=True)]
        return Piece(whole, tuple(span for span in spans if span[0] < span[1]))

    def _alone(self, messages: Messages, tools: Tools, answer: Answer, close: str) -> Piece:
        """Return a document that ends with the last of `messages`, and of which that answer alone
        gets labels. `close`: the text that ends the answer."""
        text = answer.text + close
        spans = [(answer.begin, len(text))]
        if self.rendering.marks(tools):
            shift = len(text) - len(self.rendering.text(messages, tools))
            marked = [
                (begin + shift, end + shift)
                for begin, end in self.rendering.marked(messages, tools)
            ]
            spans = [(max(begin, answer.begin), end) for begin, end in marked]
        return Piece(text, tuple(span for span in spans if span[0] < span[1]))

    def _answer(self, messages: Messages, tools: Tools, at: int, whole: str) -> Answer:
        """Return message `at` as an Answer: the text rendered up to its end, and where it begins in
        it. `whole` is the text of the whole conversation."""
        # If the assistant speaks first, its header gets labels too: templates refuse to render
        # an empty conversation.
        before = self.rendering.text(messages[:at], tools, prompt=True) if at else ""
        own = whole if at == len(messages) - 1 else self.rendering.text(messages[: at + 1], tools)
        begin = self.rendering.shared_text(before, own)
        if begin == len(before) and whole.startswith(own):
            return Answer(own, begin, len(own))
        plain = self.rendering.text(messages[:at], tools) if at else ""
        cut = self.rendering.shared_text(plain, before)  # where the prompt for an answer begins
        if begin < len(before) and begin <= cut:  # the text before the answer is different
            answer = self._after(messages, tools, at, before, own)
            return Answer(before + answer, len(before), None)
        if whole.startswith(own):
            return Answer(own, begin, len(own))
        # A template may close any text that has no generation prompt, whoever speaks last. Every
        # other difference from the whole conversation belongs to the answer.
        further = self.rendering.text(messages[: at + 1], tools, prompt=True)
        end = further.removesuffix(before[cut:])
        closed = (
            own == end + plain[cut:] and further == end + before[cut:] and whole.startswith(end)
        )
        return Answer(own, begin, len(end) if closed else None)

    def _after(self, messages: Messages, tools: Tools, at: int, before: str, own: str) -> str:
        """Return the text of message `at` in `own`, without the generation prompt that ends
        `before`."""
        last = messages[at - 1]
        other = {**last, "content": "y" if str(last.get("content")).rstrip().endswith("x") else "x"}
        prompt = _shared_end(
            before, self.rendering.text([*messages[: at - 1], other], tools, prompt=True)
        )
        answered = _shared_end(
            own, self.rendering.text([*messages[: at - 1], other, messages[at]], tools)
        )
        if not answered.startswith(prompt):
            raise UserError(
                f"message {at + 1} cannot be separated from the messages before it: the chat "
                "template writes those differently in a prompt and before an answer. Set "
                "data.chat_template=FILE, a template that writes them alike."
            )
        return answered[len(prompt) :]


def _shared_end(one: str, other: str) -> str:
    return os.path.commonprefix((one[::-1], other[::-1]))[::-1]  # noqa: RUF071 - texts
