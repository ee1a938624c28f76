"""What is asked of a model and its batch: a question yields rows, or none if it does not apply."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flashtrain.checks.packed import Document, Packed
from flashtrain.checks.rows import FAULT, OK, Row, compared, loss_of, rounding, vocabulary_of
from flashtrain.distributed.context.batch import LABELS
from flashtrain.models.token_probe import EXACT, probe
from flashtrain_kernels.loss_head import IGNORED

MOST = 8  # documents of a batch that are asked about


def positions_restart(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Whether each document's positions are those that it has alone."""
    if name := packed.positions:
        x = packed.batch[name]
        pairs = [(packed.alone(one)[name][0], x[one.row, one.begin :]) for one in packed.documents]
        wrong = sum(not torch.equal(own, here[: len(own)]) for own, here in pairs)
        words = f"not in {wrong} documents" * (wrong > 0)
        yield Row("positions restart", FAULT if wrong else OK, words)


def labels_within(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Whether no token is to predict the first one of the document behind."""
    if packed.shift is not None:
        ends = {(one.row, one.end) for one in packed.documents}
        begun = [one for one in packed.documents if (one.row, one.begin) in ends]
        found = (packed.batch[LABELS][one.row, one.begin - packed.shift] for one in begun)
        across = sum(int(label) != IGNORED for label in found)
        words = f"{across} first tokens are labels of the document before" * (across > 0)
        yield Row("labels stay within documents", FAULT if across else OK, words)


def apart(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Whether the border tokens of a document change no other document's loss."""
    found = []
    for one in _some(packed.documents) if len(packed.documents) > 1 else ():
        others = [other for other in packed.documents if other != one]
        places = one.row, one.begin, one.end - 1
        found.append(_unmoved("documents apart", model, packed, others, *places))
    yield from _worst(found)


def later_unseen(model: Any, packed: Packed) -> Iterator[Row]:
    """Whether a token changes no loss of the tokens before it."""
    row, begin, end = longest = max(packed.documents, key=lambda one: one.end - one.begin)
    if packed.shift is not None and getattr(model, "mask", None) is None:
        middle = (begin + end) // 2
        earlier = longest._replace(end=middle - packed.shift)
        yield _unmoved("later tokens unseen", model, packed, [earlier], row, middle)


def _unmoved(
    title: str, model: nn.Module, packed: Packed, scored: Sequence[Document], row: int, *places: int
) -> Row:
    """Return whether other tokens at these places of a row leave the loss of the `scored` documents
    as it is; the fault names where a state of theirs first differs."""
    before, others = packed.scored(*scored), packed.of(*scored)
    after = packed.changed(before, row, *places)
    losses: list[Tensor] = []

    def run(again: bool) -> None:
        losses.append(loss_of(model, after if again else before))

    one_row = len(others) == 1
    _, moved = probe(run, others.shape[1], others[0] & one_row, shared=False)
    words = "another loss moves" + (f", first by {moved}" if moved else "")
    # Of small weights the loss hardly moves, though a state does.
    return compared(title, losses[0], losses[1], -1.0 if moved else EXACT, words)


def as_alone(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Whether a document's loss in its row is its loss alone."""
    found = []
    for one in _some([one for one in packed.documents if one.end - one.begin > 2]):
        whole, alone = packed.scored(one), Packed(packed.alone(one))
        if bool((whole[LABELS] != IGNORED).any()):
            losses = loss_of(model, alone.scored(*alone.documents)), loss_of(model, whole)
            words = "a document has another loss alone"
            found.append(compared("packed equals alone", *losses, rounding(model), words))
    yield from _worst(found)


def padding_unseen(model: Any, packed: Packed) -> Iterator[Row]:
    """Whether a document's loss beside padding, on either side, is its loss without."""
    if "attention_mask" in inspect.signature(model.forward).parameters:
        one = packed.of_one(vocabulary_of(model), 24)
        one["attention_mask"] = torch.ones_like(one[packed.name])
        for side, around in (("left", (11, 0)), ("right", (0, 11))):
            batch = {name: pad(x, around, value=-100 * (name == LABELS)) for name, x in one.items()}
            title, words = f"padding on the {side} unseen", "a document has another loss beside it"
            losses = loss_of(model, one), loss_of(model, batch)
            yield compared(title, *losses, rounding(model), words)


def _some(documents: Sequence[Document]) -> Sequence[Document]:
    return documents[:: -(-len(documents) // MOST) or 1]


def _worst(rows: Sequence[Row]) -> Sequence[Row]:
    return sorted(rows, key=lambda row: (row.verdict == FAULT, row.figure))[-1:]


QUESTIONS = (
    positions_restart, labels_within, apart, as_alone, later_unseen, padding_unseen,
)  # fmt: skip
