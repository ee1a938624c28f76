"""Check that documents of a row do not see each other, and that what a model declares is felt.

    print(flashtrain.check(model))                       # any decoder of transformers
    print(flashtrain.check(module, next(iter(loader))))  # a LightningModule and its batch

Each row of the table is one question, answered by forwards that differ in one thing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.functional import pad

from flashtrain.checks.packed import LENGTHS, OURS, Batch, Document, Packed, made_batch
from flashtrain.distributed.context.attention_check import silent_twin
from flashtrain.distributed.context.batch import LABELS
from flashtrain.errors import UserError, first_line
from flashtrain.models.token_probe import EXACT, probe
from flashtrain.models.trainable import Trainable
from flashtrain.tasks.language.task import LanguageModel
from flashtrain_kernels.loss_head import IGNORED

# Of a loss: sums of other sizes are rounded otherwise, in 32 and in 16 bits.
ROUNDING, ROUNDING_16 = 1e-4, 2e-2
MOST = 8  # documents of a batch that are asked about
OK, FAULT, NONE = "ok", "FAULT", "-"


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


def check(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    ranks: int = 1,
    shard: Callable[[Batch, int, int], Batch] | None = None,
) -> Report:
    """Check what a model's tokens see; nothing of it is changed.

    Args:
        model: a decoder of transformers (also with adapters), one of flashtrain's, or a
            LightningModule whose training_step returns its mean loss.
        batch: a batch as the model is trained on; None: one is made.
        collator: a trainer's collator, which makes the batch of samples {"input_ids": [...]}.
        lengths: the documents' lengths; None: what the batch says by position_ids,
            cu_seq_lens_q, seq_idx, documents or attention_mask.
        ranks: above 1: also compute the loss on so many processes that share the batch's rows.
        shard: shard(batch, rank, ranks) returns a rank's part for a model that shares rows by
            itself; None: flashtrain's context parallelism shares them.

    Raises:
        UserError: the model cannot compute the loss of the batch.
    """
    from flashtrain.checks.declared import declared
    from flashtrain.checks.ranks import equals_ranks

    vocabulary, names = vocabulary_of(model), {}
    if isinstance(model, Trainable):
        model, names = LanguageModel(model, document_mask=True), OURS
    if isinstance(model, LanguageModel):
        names = OURS
    made = made_batch(vocabulary, LENGTHS, **names)
    if collator is not None:
        documents = made["input_ids"][0]
        batch = collator([{"input_ids": one.tolist()} for one in documents.split(LENGTHS)])
        # Where it put them one after the other, whatever it says of them.
        joined = torch.equal(batch.get("input_ids", made).flatten(), documents)
        lengths = LENGTHS if joined and lengths is None else lengths
    packed, modes = Packed(batch or made, lengths), [(one, one.training) for one in model.modules()]
    model.eval()
    report = Report()
    try:
        with isolate_rng():
            try:
                loss_of(model, packed.batch)
            except Exception as error:
                fails = f"{type(model).__name__} fails on the batch: {first_line(error)}."
                raise UserError(fails) from error
            for ask in (
                positions_restart, labels_within, apart, as_alone, later_unseen, padding_unseen,
                declared,
            ):  # fmt: skip
                try:
                    report.extend(ask(model, packed))
                except Exception as error:  # noqa: BLE001 - of a model that no one here wrote
                    name = ask.__name__.replace("_", " ")
                    report.append(Row(name, NONE, f"it fails: {first_line(error)}"))
            if ranks > 1:
                report.append(equals_ranks(model, packed, ranks, shard))
    finally:
        for one, mode in modes:
            one.training = mode
    return report


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
        if isinstance(one, Trainable):
            return one.shape.vocab_size
        if isinstance(one, nn.Embedding):
            return one.num_embeddings
    return 4 + 1  # a model with an embedding of its own has a batch of its own


def compared(
    check: str, one: Tensor, other: Tensor, most: float, words: str, *, differ: bool = False
) -> Row:
    """Return a row on two losses, a fault with these words if they are further apart than `most`,
    or with `differ` if they are not."""
    figure = float((one - other).abs() / one.abs().clamp(min=1e-3))
    fault = (figure <= most) if differ else not figure <= most
    return Row(check, FAULT, words, figure) if fault else Row(check, OK, "", figure)


def rounding(model: nn.Module) -> float:
    """Return how far a model's losses may be apart by rounding."""
    return ROUNDING if next(model.parameters()).dtype.itemsize > 2 else ROUNDING_16


def positions_restart(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Whether each document's positions are those that it has alone."""
    if name := packed.positions:
        given = (
            (one, packed.batch[name][one.row, one.begin : one.end]) for one in packed.documents
        )
        wrong = sum(not torch.equal(x, packed.alone(one)[name][0]) for one, x in given)
        yield Row(
            "positions restart", FAULT if wrong else OK, f"not in {wrong} documents" * (wrong > 0)
        )


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
    before, losses, others = packed.scored(*scored), [], packed.of(*scored)
    after = packed.changed(before, row, *places)

    def run(again: bool) -> None:
        losses.append(loss_of(model, after if again else before))

    one_row = len(others) == 1
    _, moved = probe(run, others.shape[1], others[0] & one_row, shared=False)
    words = "another loss moves" + (f", first by {moved}" if moved else "")
    return compared(title, *losses, EXACT, words)


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
