"""What is asked of a model and its batch: a question yields rows, or none if it does not apply."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flashtrain.checks.packed import Batch, Document, Packed
from flashtrain.distributed.context.attention_check import silent_twin
from flashtrain.distributed.context.batch import LABELS
from flashtrain.errors import UserError
from flashtrain.models.token_probe import EXACT, probe
from flashtrain.models.trainable import Trainable
from flashtrain.tasks.language.task import LanguageModel
from flashtrain_kernels.loss_head import IGNORED

OK, FAULT, NONE = "ok", "FAULT", "-"
MOST = 8  # documents of a batch that are asked about
NEAR = 32  # tokens beside a changed document whose states are compared; losses are of all tokens
PADDING = 3  # a token


class Row(NamedTuple):
    """The answer to one question: OK, FAULT, or NONE where it could not be asked."""

    check: str
    verdict: str
    words: str = ""
    figure: float | None = None  # how far two losses are apart, relative to them


class Report(list[Row]):
    """The rows of a check; as text, their table."""

    @property
    def faults(self) -> list[Row]:
        """The rows whose verdict is FAULT."""
        return [row for row in self if row.verdict == FAULT]

    def __str__(self) -> str:
        figures = ("" if one.figure is None else f"{one.figure:.1e}" for one in self)
        rows = (f"{row.verdict:<6}{row.check:<30}{next(figures):>9}  {row.words}" for row in self)
        return "\n".join(map(str.rstrip, rows))

    def require(self) -> None:
        """Raise UserError, which names every fault, if there is one."""
        if found := "; ".join(f"{row.check}: {row.words}" for row in self.faults):
            raise UserError(f"flashtrain.check found faults: {found}.")


@torch.no_grad()
def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return a model's mean loss of the labels in a batch."""
    device = next(model.parameters()).device
    batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    if isinstance(model, LanguageModel):
        found: Any = model.batch_loss(batch)  # type: ignore[arg-type]
    elif isinstance(model, pl.LightningModule):
        found = silent_twin(model).training_step(batch, 0)
    else:
        names = inspect.signature(model.forward).parameters
        if all(one.kind is not one.VAR_KEYWORD for one in names.values()):
            batch = {name: x for name, x in batch.items() if name in names}
        for name in ("use_cache", "output_router_logits"):  # of which the loss is of all tokens
            if hasattr(getattr(model, "config", None), name):
                batch[name] = False
        found = model(**batch)
    return (found["loss"] if isinstance(found, Mapping) else found).detach().double()


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens a model knows."""
    for one in model.modules():
        if isinstance(one, Trainable) and one.shape is not None:
            return one.shape.vocab_size
        # The first embedding of a model that reads images may be of their places.
        found = getattr(one, "get_input_embeddings", lambda own=one: own)()
        if isinstance(found, nn.Embedding):
            return found.num_embeddings
    return 5  # a model with an embedding of its own has a batch of its own


def compared(check: str, one: Tensor, other: Tensor, most: float, words: str) -> Row:
    """Return a row on two losses, a fault with these words if they differ by above `most`."""
    figure = float((one - other).abs() / one.abs().clamp(min=1e-3))
    return Row(check, OK, "", figure) if figure <= most else Row(check, FAULT, words, figure)


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
    """Whether the border tokens of a document change no other document's loss; a fault names where
    a state of theirs first differs."""
    found = []
    if len(packed.documents) < 2:
        yield Row("documents apart", NONE, "the batch tells of one: give lengths= or collator=")
    for one in _some(packed.documents) if len(packed.documents) > 1 else ():
        others = [other for other in packed.documents if other != one]
        before, theirs = packed.scored(*others), packed.of(*others)
        losses: list[Tensor] = []
        if not bool((before[LABELS] != IGNORED).any()):
            continue  # a mean of nothing
        tokens = before[packed.name].clone()
        for place in {one.begin, one.end - 1}:
            tokens[one.row, place] += 1 if tokens[one.row, place] < 2 else -1
        run = partial(_run, model, (before, {**before, packed.name: tokens}), losses)
        near = Document(one.row, max(one.begin - NEAR, 0), one.end + NEAR)
        _, moved = probe(run, tokens.shape[1], theirs & packed.of(near), shared=False)
        words = f"another document moves, first by {moved}" if moved else "another loss moves"
        # Of small weights the loss hardly moves, though a state does.
        most = -1.0 if moved else EXACT
        found.append(compared("documents apart", losses[0], losses[1], most, words))
    yield from _worst(found)


def _run(model: nn.Module, batches: Sequence[Batch], losses: list[Tensor], again: bool) -> None:
    losses.append(loss_of(model, batches[again]))


def as_alone(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Whether a document's loss in its row is its loss alone."""
    found = []
    for one in _some([one for one in packed.documents if one.end - one.begin > 2]):
        whole, alone = packed.scored(one), Packed(packed.alone(one))
        if bool((whole[LABELS] != IGNORED).any()):
            losses = loss_of(model, alone.scored(*alone.documents)), loss_of(model, whole)
            words = "a document has another loss alone"
            found.append(compared("packed equals alone", *losses, packed.rounding, words))
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
            other = batch[packed.name].masked_fill(batch["attention_mask"] == 0, PADDING)
            moved = losses[1], loss_of(model, {**batch, packed.name: other})
            rows = (compared(title, *losses, packed.rounding, words),)
            yield from _worst((*rows, compared(title, *moved, EXACT, words)))


def _some(documents: Sequence[Document]) -> Sequence[Document]:
    return documents[:: -(-len(documents) // MOST) or 1]


def _worst(rows: Sequence[Row]) -> Sequence[Row]:
    return sorted(rows, key=lambda row: (row.verdict == FAULT, row.figure))[-1:]


QUESTIONS = positions_restart, labels_within, apart, as_alone, padding_unseen
