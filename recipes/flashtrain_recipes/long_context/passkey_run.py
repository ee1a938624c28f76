"""mode=passkey: whether a model finds a number hidden in a long, dull text, as a
table by length and depth.

The task is Mohtashami and Jaggi's (2023, "Landmark Attention", section 4.2); the words are our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashtrain.announce import say
from flashtrain.data.tokenizers import Tokenizer, as_prompt
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import make_unique
from flashtrain.models.generation import generate
from flashtrain.report.rows import RESULT, Row, write_result
from flashtrain.report.table import View
from flashtrain.settings.settings import Settings
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.language.trained import load_trained, move
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.long_context.evaluate import autocast_dtype

INTRODUCTION = (
    "Somewhere in the long text below stands a pass key. "
    "Find it and keep it in mind: it is asked for at the end.\n"
)
FILLER = (
    " The river runs to the sea. The hills are old and quiet. A cart goes by and is gone. "
    "Nothing happens here."
)
HIDDEN = "\nThe pass key is {key}. Keep it in mind: {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
DIGITS = 5  # of a key
SPARE_TOKENS = 2  # read beyond the answer, to see that the number ends there

# (a prompt's tokens, how many) -> that many tokens with which a model continues it.
Continue = Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class Prompt:
    """A prompt that hides a pass key: its tokens, the key, and how many tokens
    the model is to write."""

    tokens: list[int]
    key: str  # a number
    answer: int  # how many tokens the model is to write


def make_prompt(tokenizer: Tokenizer, key: str, *, length: int, depth: float) -> Prompt:
    """Return a prompt that, together with its answer, is `length` tokens long.

    Args:
        key: the number to hide.
        depth: the share of the filler text that comes before the key, 0 to 1.

    Raises:
        UserError: the length has no room for filler.
    """
    # parts are tokenised one by one and the filler is cut to the token, so that any tokenizer
    # gives the exact length
    introduction = as_prompt(tokenizer, INTRODUCTION)
    filler, hidden, question, answer = (
        tokenizer.encode(text.format(key=key)) for text in (FILLER, HIDDEN, QUESTION, ANSWER)
    )
    count = len(answer) + SPARE_TOKENS
    fixed = len(introduction) + len(hidden) + len(question) + count
    room = length - fixed
    if room < 1:
        raise UserError(
            f"passkey.lengths: {length} tokens are too few for the prompt: "
            f"choose {fixed + 1} or more."
        )
    before = round(depth * room)
    text = filler * (room // len(filler) + 1)
    return Prompt(
        [*introduction, *text[:before], *hidden, *text[: room - before], *question], key, count
    )


def passkey_rows(
    answer: Continue,
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
) -> list[Row]:
    """Return a row {length, depth, accuracy, trials} for each length and depth; accuracy is
    the share of keys found.

    The model's greedy answer must begin with the key, and the number must end there. Guessing finds
    one of 9 * 10^(DIGITS - 1) keys, which do not begin with 0.

    Args:
        answer: called with a prompt's tokens and a number, returns so many tokens that the
            model writes next.
        trials: how many random keys are hidden and asked for at each length and depth.
    """
    drawn = random.Random(seed)
    rows: list[Row] = []
    for length in lengths:
        for depth in depths:
            keys = [str(drawn.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in range(trials)]
            found = sum(
                _answers(answer, tokenizer, make_prompt(tokenizer, key, length=length, depth=depth))
                for key in keys
            )
            rows.append(
                {"length": length, "depth": depth, "accuracy": found / trials, "trials": trials}
            )
    return rows


def _answers(answer: Continue, tokenizer: Tokenizer, prompt: Prompt) -> bool:
    text = tokenizer.decode(answer(prompt.tokens, prompt.answer)).lstrip()
    return text.startswith(prompt.key) and not text[len(prompt.key) :][:1].isdigit()


def evaluate_passkey(settings: Settings, hardware: Hardware) -> list[Row]:
    """Test the model of settings.checkpoint, print the table, write RUN/passkey/result.json, and
    return the rows.

    Raises:
        UserError: the model writes no text, or it has learned positions and a length exceeds its
            context.
    """
    options = settings.passkey
    lengths = list(options.lengths) if options.lengths is not None else [settings.context]
    longest = settings.having(context=max(settings.context, *lengths))
    trained = load_trained(str(settings.checkpoint), attention=hardware.attention, settings=longest)
    model = move(trained.model, hardware.kind, hardware.precision)
    dtype, mask = autocast_dtype(hardware.precision), make_mask(settings.applied_mask, packed=False)

    def answer(prompt: list[int], count: int) -> list[int]:
        with torch.autocast(hardware.kind, dtype=dtype, enabled=dtype is not None):
            written = generate(model, torch.tensor([prompt]), count, temperature=0, mask=mask)
        return written[0, len(prompt) :].tolist()

    found = passkey_rows(
        answer,
        trained.tokenizer,
        lengths=lengths,
        depths=options.depths,
        trials=options.trials,
        seed=settings.seed,
    )
    model_columns = {
        "model": settings.named(settings.model.label),
        "context": settings.context,
        "step": trained.step,
    }
    rows = [{**model_columns, **row} for row in found]
    say(
        f"fraction of {options.trials} trials that found the passkey: "
        f"{trained.checkpoint} (step {trained.step})"
    )
    shown = [{**row, "depth": f"depth {row['depth']:.0%}"} for row in rows]
    View(["length"], pivot="depth", value="accuracy").table(shown).print()
    folder = make_unique(trained.folder, "passkey")
    write_result(folder / RESULT, settings.recipe, _command(settings, lengths), rows)
    say(f"the result's rows are in {folder / RESULT}")
    return rows


def _command(settings: Settings, lengths: list[int]) -> str:
    options = settings.passkey
    depths = ",".join(f"{depth:g}" for depth in options.depths)
    return (
        f"python -m flashtrain mode=passkey checkpoint={settings.checkpoint} "
        f"passkey.lengths=[{','.join(map(str, lengths))}] passkey.depths=[{depths}] "
        f"passkey.trials={options.trials} seed={settings.seed}"
    )
