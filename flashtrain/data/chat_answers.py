"""What is learnt of a conversation: its answers, each as the model would write it after what it is then shown.

Where a template marks what the assistant says ({% generation %}), its marks are taken. Else an answer is found by
rendering what comes before it, with the prompt for an answer, and what ends with it: where the second departs from the
first, the answer begins. What ends with it must begin the whole conversation. A template that rewrites earlier turns
(one that strips their thinking, say) fails that, and each answer becomes a document of its own, of what the model is
shown when it gives that answer.

Behind an answer whose end the template does not write (GLM's), the next role's marker is learnt.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from flashtrain.data.chat_messages import Messages
from flashtrain.data.chat_rendering import ChatRendering, Tools
from flashtrain.errors import UserError

# A conversation by which a template shows where answers end.
ASK, ANSWER, MORE = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "an answer"}, "more"
FOLLOWING = ("user", "tool", "system")  # roles whose marker may be what ends an answer


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


class Answer(NamedTuple):
    """The text of what the model is shown before an answer and of it, and where in that it begins.

    within: where it ends in the text of the whole conversation; None: that has it, or what comes before, otherwise.
    """

    text: str
    begin: int
    within: int | None


class ChatAnswers:
    """The answers of conversations, by a template."""

    def __init__(self, rendering: ChatRendering) -> None:
        self.rendering = rendering

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
        """The documents of a conversation, of which these messages are learnt: one, or one for each answer.

        whole: the conversation's text. first: the first message that counts. close: where the template writes no end of
        an answer, what follows it is learnt.
        UserError: an answer that cannot be made out.
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
        """The ids of the tokens after which an answer is over, as far as they are learnt."""
        ends = self._end or "".join(self._markers.values())
        found = map(self.rendering.library.token_to_id, dict.fromkeys(self.rendering.added(ends)))
        return [number for number in found if number is not None]

    @property
    def endless(self) -> bool:
        """Whether nothing is learnt behind an answer that the model could stop at."""
        return not self._end and "user" not in self._markers

    @cached_property
    def _end(self) -> str:
        """The last added token that is learnt behind an answer's own text; "" where the template writes none."""
        talk = [ASK, ANSWER, ASK]
        try:
            found = self.pieces(talk, None, [1], self.rendering.text(talk, None), close=False)
        except UserError:  # it has no template, or one that takes no such conversation
            return ""
        learnt = "".join(piece.text[begin:end] for piece in found for begin, end in piece.learnt)
        return "".join(self.rendering.added(learnt.rpartition(ANSWER["content"])[2])[-1:])

    @cached_property
    def _markers(self) -> dict[str, str]:
        """What stands between an answer and a message of a role, up to its first added token."""
        found = {}
        for role in FOLLOWING:
            try:
                if self.rendering.marks(None):  # which says what is learnt
                    break
                text = self.rendering.text([ASK, ANSWER, {"role": role, "content": MORE}], None)
            except UserError:
                continue
            between = text.rpartition(MORE)[0].rpartition(ANSWER["content"])[2]
            for marker in self.rendering.added(between)[:1]:
                found[role] = between[: between.find(marker) + len(marker)]
        return found

    def _close(self, messages: Messages, at: int) -> str:
        """What is learnt behind message `at` where the template writes no end of an answer."""
        if self._end:
            return ""
        last = "tool" if messages[at].get("tool_calls") else "user"
        return self._markers.get(messages[at + 1]["role"] if at + 1 < len(messages) else last, "")

    def _together(
        self, messages: Messages, tools: Tools, own: Sequence[Answer], closes: Sequence[str], whole: str, first: int
    ) -> Piece:
        """The conversation as one document."""
        if self.rendering.marks(tools):
            marked = self.rendering.marked(messages, tools)
            begin = self.rendering.shared_text(self.rendering.text(messages[:first], tools), whole) if first else 0
            return Piece(whole, tuple(span for span in marked if begin <= span[0] < span[1]))
        if own[-1].within == len(whole):
            whole += closes[-1]
        ends = [int(one.within or 0) for one in own]
        ends = [end + len(close) * whole.startswith(close, end) for end, close in zip(ends, closes, strict=True)]
        spans = [(one.begin, end) for one, end in zip(own, ends, strict=True)]
        return Piece(whole, tuple(span for span in spans if span[0] < span[1]))

    def _alone(self, messages: Messages, tools: Tools, answer: Answer, close: str) -> Piece:
        """The last of these messages as a document of its own."""
        text = answer.text + close
        spans = [(answer.begin, len(text))]
        if self.rendering.marks(tools):
            shift = len(text) - len(self.rendering.text(messages, tools))
            marked = [(begin + shift, end + shift) for begin, end in self.rendering.marked(messages, tools)]
            spans = [(max(begin, answer.begin), end) for begin, end in marked]
        return Piece(text, tuple(span for span in spans if span[0] < span[1]))

    def _answer(self, messages: Messages, tools: Tools, at: int, whole: str) -> Answer:
        """Message `at` by what the model is shown before it, and what the template writes when it comes last."""
        # Of a conversation that the assistant begins, its header is learnt too: templates refuse to render nothing.
        before = self.rendering.text(messages[:at], tools, prompt=True) if at else ""
        own = whole if at == len(messages) - 1 else self.rendering.text(messages[: at + 1], tools)
        begin = self.rendering.shared_text(before, own)
        if begin == len(before) and whole.startswith(own):
            return Answer(own, begin, len(own))
        plain = self.rendering.text(messages[:at], tools) if at else ""
        cut = self.rendering.shared_text(plain, before)  # where the prompt for an answer begins
        if begin < len(before) and begin <= cut:  # what comes before is written otherwise
            answer = self._after(messages, tools, at, before, own)
            return Answer(before + answer, len(before), None)
        if whole.startswith(own):
            return Answer(own, begin, len(own))
        # A template may close what ends without a prompt for an answer, whoever speaks last. All else that differs from
        # the whole conversation is of the answer.
        further = self.rendering.text(messages[: at + 1], tools, prompt=True)
        end = further.removesuffix(before[cut:])
        closed = own == end + plain[cut:] and further == end + before[cut:] and whole.startswith(end)
        return Answer(own, begin, len(end) if closed else None)

    def _after(self, messages: Messages, tools: Tools, at: int, before: str, own: str) -> str:
        """What the template writes of message `at`, where that changes what it writes before: what follows the content
        of the message before in its text `own`, less the prompt for an answer. UserError: that does not follow there.
        """
        last = messages[at - 1]
        other = {**last, "content": "y" if str(last.get("content")).rstrip().endswith("x") else "x"}
        asked = _shared_end(before, self.rendering.text([*messages[: at - 1], other], tools, prompt=True))
        answered = _shared_end(own, self.rendering.text([*messages[: at - 1], other, messages[at]], tools))
        if not answered.startswith(asked):
            raise UserError(
                f"message {at + 1} cannot be separated from the messages before it: the chat template writes those "
                "differently in a prompt. Expected the same text; use another template (data.chat_template=FILE)."
            )
        return answered[len(asked) :]


def _shared_end(one: str, other: str) -> str:
    """The text that both end with."""
    return os.path.commonprefix((one[::-1], other[::-1]))[::-1]  # noqa: RUF071 - texts
