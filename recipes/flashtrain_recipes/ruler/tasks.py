"""RULER's eleven generated tasks (Hsieh et al. 2024, arXiv 2404.06654, sections 3.1 to 3.3 and
appendix B), and two of questions that are our own.

As in the paper: kinds and numbers of keys, values, hops and repetitions, an answer's room and its
first words, one solved example before vt and cwe. The sentences are ours, the words the text's.
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import NamedTuple

from flashtrain_recipes.ruler.haystack import Haystack, made_up

NOISE = (
    "The river runs to the sea. The hills are old and quiet. A cart goes by and is gone. "
    "Nothing happens here.\n"
)
DEPTHS = 40  # evenly spaced places at which needles are hidden
HOPS = 4  # of the chain of variables
COMMON, FREQUENT = 10, 3  # words that cwe and fwe ask for
ZETA = math.pi**2 / 6  # zeta(2): rank k has the frequency 1 / (k^2 zeta(2)) (section 3.3)
FEWEST = math.ceil(ZETA / (4**-2 - 5**-2))  # words of fwe from which its ranks 4 and 5 differ
Draw = random.Random
Around = Callable[[Draw], Iterator[str]]  # pieces without end
Context = Callable[[int], str]  # a prompt's long part, of so many pieces


class Question(NamedTuple):
    """A prompt in its parts."""

    introduction: str
    context: Context
    question: str
    answer: str  # its first words, which the model goes on with
    references: list[str]  # what the rest of the answer should contain


def score(answer: str, references: Sequence[str]) -> float:
    """Return 100 times the share of the references that an answer contains (section 4). Our own
    questions have one reference, for which the paper's other score is the same."""
    return 100 * sum(one.lower() in answer.lower() for one in references) / len(references)


def _needles(
    among: str, key: str, value: str, keys: int, each: int, queries: int, draw: Draw, text: Haystack
) -> Question:
    """Sentences that give keys their values, among noise, text or others of their kind."""

    def drawn(kind: str, draw: Draw) -> str:
        if kind == "word":
            return "-".join(draw.choices(text.words[:2000], k=2))
        if kind == "number":
            return str(draw.randrange(10**6, 10**7))
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))

    def needle(name: str, given: str) -> str:
        return f"The secret {value} of {name} is {given}.\n"

    def around(draw: Draw) -> Iterator[str]:
        new = (drawn(key, draw) for _ in count())
        others = (needle(name, drawn(value, draw)) for name in new if name not in named)
        return {"noise": repeat(NOISE), "text": text.read(draw), "needles": others}[among]

    named = {drawn(key, draw): [drawn(value, draw) for _ in range(each)] for _ in range(keys)}
    needles = [needle(name, one) for name, given in named.items() for one in given]
    asked = draw.sample(list(named), queries)
    what, verb = (f"{value}s", "are") if each * queries > 1 else (value, "is")
    what = f"the secret {what} of {', '.join(asked)}"
    return Question(
        f"Remember each secret {value} of this text, for you will be asked for it.\n\n",
        _hidden(draw, draw.sample(needles, len(needles)), around),
        f"\n\nIn the text above, what {verb} {what}?",
        f" In the text above, {what} {verb}",
        [one for name in asked for one in named[name]],
    )


def _variables(draw: Draw, text: Haystack) -> Question:
    """A chain of variables that take one another's value, in noise, after a solved one."""
    solved, asked = _chain(draw, 3), _chain(draw, 5)
    return _after(solved, 5, " ".join(solved.references), asked)


def _chain(draw: Draw, letters: int) -> Question:
    first = draw.sample(string.ascii_uppercase, HOPS + 1)  # which names differ by
    names = [one + "".join(draw.choices(string.ascii_uppercase, k=letters - 1)) for one in first]
    value = str(draw.randrange(10_000, 100_000))
    lines = [f"LET {name} = {one}\n" for name, one in zip(names, [value, *names], strict=False)]
    return Question(
        "This text sets variables, some of them to other variables. Follow them.\n\n",
        _hidden(draw, lines, lambda _: repeat(NOISE)),
        f"\nQuestion: which variables of the text above have the value {value}?",
        f" Answer: {len(names)} variables of the text above have the value {value}:",
        names,
    )


def _common_words(draw: Draw, text: Haystack) -> Question:
    """A numbered list in which ten words are more frequent than the others, after a solved one."""
    begin = draw.randrange(2000)
    solved = _counted(draw, text.words[begin : begin + 40], 10, 3)
    asked = _counted(draw, text.words[begin + 40 :], 30, 3)
    return _after(solved, 30, _numbered(solved.references), asked)


def _counted(draw: Draw, words: list[str], often: int, rarely: int) -> Question:
    seed = draw.random()

    def context(pieces: int) -> str:
        listed = words[:COMMON] * often + words[COMMON : COMMON + pieces] * rarely
        return _numbered(random.Random(seed).sample(listed, len(listed)))

    return Question(
        "Some words of this numbered list are more frequent than others. Remember them.\n\n",
        context,
        f"\n\nQuestion: which {COMMON} words are the most frequent of the list above?",
        f" Answer: the {COMMON} most frequent words of the list above are:",
        words[:COMMON],
    )


def _frequent_words(draw: Draw, text: Haystack) -> Question:
    """Coded words whose frequencies are a zeta distribution's, alpha = 2; rank 1 is dots."""
    coded = ["....", *("".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(2000))]
    seed = draw.random()

    def context(pieces: int) -> str:
        total = (FEWEST + pieces) / ZETA
        words = [one for rank, one in enumerate(coded, 1) for _ in range(int(total / rank**2))]
        return " ".join(random.Random(seed).sample(words, len(words)))

    return Question(
        "The words of this text are in code. Count how often each of them occurs.\n\n",
        context,
        f"\n\nQuestion: which {FREQUENT} coded words are the most frequent of the text above, "
        "apart from the dots? Give the words alone.",
        f" Answer: the {FREQUENT} most frequent coded words of the text above are:",
        coded[1 : FREQUENT + 1],
    )


def _lives(hops: int, draw: Draw, text: Haystack) -> Question:
    """A question about one of many short biographies, or about the teacher whom it names."""

    def names(draw: Draw) -> list[str]:
        return [f"{made_up(draw, 2)} {made_up(draw, 3)}".title() for _ in range(3)]

    def life(name: str, town: str, teacher: str) -> str:
        return f"{name} was born in {town} and was taught by {teacher}.\n"

    (pupil, town, teacher), (_, their_town, other) = names(draw), names(draw)
    lines = [life(pupil, town, teacher), life(teacher, their_town, other)]
    who = pupil if hops == 1 else f"the teacher of {pupil}"
    return Question(
        "Read these biographies.\n\n",
        _hidden(draw, draw.sample(lines, 2), lambda new: (life(*names(new)) for _ in count())),
        f"\nQuestion: in which town was {who} born? Give the name of the town alone.",
        f" Answer: {who} was born in",
        [town if hops == 1 else their_town],
    )


def _hidden(draw: Draw, lines: Sequence[str], around: Around) -> Context:
    """The context that has the lines, in their order, at drawn depths of what is around them."""
    depths, seed = sorted(draw.sample(range(DEPTHS), len(lines))), draw.random()

    def context(pieces: int) -> str:
        found = list(islice(around(random.Random(seed)), pieces))
        for depth, line in reversed([*zip(depths, lines, strict=True)]):
            found.insert(round(depth / (DEPTHS - 1) * pieces), line)
        return "".join(found)

    return context


def _after(solved: Question, pieces: int, answer: str, asked: Question) -> Question:
    """The question behind another one with its answer."""
    example = solved.introduction + solved.context(pieces) + solved.question + solved.answer
    return asked._replace(introduction=f"{example} {answer}\n\n{asked.introduction}")


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{at}. {word}" for at, word in enumerate(words, start=1))


# Haystack, kinds of key and value, how many keys, values of each, and keys that are asked for.
_NEEDLES = {
    "niah_single_1": ("noise", "word", "number", 1, 1, 1),
    "niah_single_2": ("text", "word", "number", 1, 1, 1),
    "niah_single_3": ("text", "word", "UUID", 1, 1, 1),
    "niah_multikey_1": ("text", "word", "number", 4, 1, 1),
    "niah_multikey_2": ("needles", "word", "number", 1, 1, 1),
    "niah_multikey_3": ("needles", "UUID", "UUID", 1, 1, 1),
    "niah_multivalue": ("text", "word", "number", 1, 4, 1),
    "niah_multiquery": ("text", "word", "number", 4, 1, 4),
}
# What makes a task's questions, and the tokens of an answer. The mean is over these.
RULER: dict[str, tuple[Callable[[Draw, Haystack], Question], int]] = {
    **{name: (partial(_needles, *how), 128) for name, how in _NEEDLES.items()},
    "vt": (_variables, 30),
    "cwe": (_common_words, 120),
    "fwe": (_frequent_words, 50),
}
# With ours in place of the paper's two questions, which need other people's data.
TASKS = RULER | {f"own_qa_{hops}": (partial(_lives, hops), 32) for hops in (1, 2)}
