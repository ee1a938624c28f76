"""Prompts of RULER's tasks that fill a given number of tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from flashtrain.data.tokenizers import Tokenizer, as_prompt
from flashtrain.errors import UserError
from flashtrain_recipes.ruler.haystack import Haystack
from flashtrain_recipes.ruler.tasks import TASKS

Encode = Callable[[str, str], list[int]]  # (a text, the first words of its answer) -> tokens
_TRIES = 8  # of a prompt's size; three are usual


def encoder(tokenizer: Tokenizer, *, chat: bool) -> Encode:
    """Return a function that encodes a text and the first words of its answer; with `chat` the text
    is a user's message, and the answer follows the template's generation prompt."""
    if not chat:
        return lambda text, answer: as_prompt(tokenizer, text + answer)
    from flashtrain.data.chat_template import ChatTemplate

    template = ChatTemplate(tokenizer)
    return lambda text, answer: [
        *template.prompt({"messages": [{"role": "user", "content": text}]}),
        *tokenizer.encode(answer.lstrip()),
    ]


def make_prompt(
    task: str, encode: Encode, haystack: Haystack, length: int, drawn: str
) -> tuple[list[int], list[str]]:
    """Return the tokens of a prompt, at most `length` and hardly fewer with its answer's room, and
    what the answer should contain. `drawn` (seed and number) decides the prompt. Raises UserError
    if the length has no room for the task."""
    make, room = TASKS[task]
    asked, most = make(random.Random(f"{drawn} {task} {length}"), haystack), length - room

    def encoded(pieces: int) -> list[int]:
        return encode(asked.introduction + asked.context(pieces) + asked.question, asked.answer)

    least = best = encoded(1)
    if len(least) > most:
        shortest = length + len(least) - most
        raise UserError(
            f"ruler.lengths={length} is too short for {task}: expected {shortest}, or shorter "
            "tasks where the model reads no more: ruler.tasks=[niah_single_1]."
        )
    # The whole is encoded anew, a few times: what a piece adds depends on what stands beside it.
    pieces, more = 1, 16
    for _ in range(_TRIES):
        pieces = max(2, pieces + more)
        found = encoded(pieces)
        best = max(best, found, key=lambda one: len(one) if len(one) <= most else 0)
        each = max(1, len(found) - len(least)) / (pieces - 1)
        more = math.floor((most - len(found)) / each)
        if more == 0 or 0.995 * most <= len(found) <= most:
            break
    return best, asked.references
