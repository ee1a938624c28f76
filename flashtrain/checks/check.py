"""Check that documents of a batch do not see each other, and that what a model declares is felt.

    import flashtrain

    print(flashtrain.check(model))                       # any decoder of transformers
    print(flashtrain.check(module, next(iter(loader))))  # a LightningModule and its batch

Nothing is trained or changed. Each row of the table is one question, answered by two or more
forwards that differ in one thing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn

from flashtrain.checks.packed import (
    LENGTHS,
    OURS,
    POSITIONS,
    Batch,
    Document,
    Packed,
    made_batch,
    padded,
)
from flashtrain.distributed.context.attention_check import silent_twin
from flashtrain.distributed.context.batch import LABELS
from flashtrain.errors import UserError, first_line
from flashtrain.models.generation import MaskMaker
from flashtrain.models.sharded_sequence import whole
from flashtrain.models.token_probe import EXACT, probe
from flashtrain.models.trainable import Trainable
from flashtrain_kernels.loss_head import IGNORED

# Of a loss: what differs by more is computed otherwise. Documents alone and packed are products of
# other sizes, whose rounding differs by the type of the weights.
ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4}
LOW_PRECISION = 2e-2
MOST = 8  # documents that are changed, or computed alone
OK, FAULT, NONE = "ok", "FAULT", "-"


@dataclass(frozen=True)
class Row:
    """The answer to one question: OK, FAULT, or NONE where it could not be asked."""

    check: str
    verdict: str
    figure: float | None = None  # by how much the loss differs, relative to itself
    words: str = ""


@dataclass
class Report:
    """The rows of a check. As text it is their table."""

    rows: list[Row] = field(default_factory=list)

    @property
    def faults(self) -> list[Row]:
        """The rows whose verdict is FAULT."""
        return [row for row in self.rows if row.verdict == FAULT]

    def __str__(self) -> str:
        figures = ["" if one.figure is None else f"{one.figure:.1e}" for one in self.rows]
        return "\n".join(
            f"{row.verdict:<6}{row.check:<32}{figure:>9}  {row.words}".rstrip()
            for row, figure in zip(self.rows, figures, strict=True)
        )

    def require(self) -> None:
        """Raise UserError if there is a fault; its text names every one."""
        if self.faults:
            found = "; ".join(f"{row.check}: {row.words}" for row in self.faults)
            raise UserError(f"the model or its batches fail a check: {found}.")


@dataclass
class Subject:
    """A model whose losses are asked for."""

    model: nn.Module
    mask: MaskMaker | None = None  # of a model of flashtrain's, as in training

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch's labels, without dropout."""
        device = next(self.model.parameters()).device
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        model: Any = self.model
        if isinstance(model, pl.LightningModule):
            found: Any = silent_twin(model).training_step(batch, 0)
        elif isinstance(model, Trainable):
            mask = self.mask and mask_of(self.mask, whole(batch, "positions"))
            found = model.loss(
                batch["tokens"], batch[LABELS], positions=batch["positions"], mask=mask
            )
        else:
            names = inspect.signature(model.forward).parameters
            if all(one.kind is not one.VAR_KEYWORD for one in names.values()):
                batch = {name: x for name, x in batch.items() if name in names}
            for name in ("use_cache", "output_router_logits"):  # whose loss is of all tokens
                if hasattr(model, "config") and hasattr(model.config, name):
                    batch[name] = False
            found = model(**batch)
        found = found["loss"] if isinstance(found, Mapping) else found
        return found.detach().double()

    @property
    def rounding(self) -> float:
        """How much losses differ by rounding, relative to themselves."""
        return ROUNDING.get(next(self.model.parameters()).dtype, LOW_PRECISION)


def check(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    mask: MaskMaker | None = None,
    ranks: int = 1,
    shard: Callable[[Batch, int, int], Batch] | None = None,
) -> Report:
    """Check what the tokens of a model see, by forwards that differ in one thing.

    Args:
        model: a decoder of transformers (also with adapters), a LightningModule whose training_step
            returns its loss, or a model of flashtrain's.
        batch: a batch as the model is trained on; None: one is made.
        collator: a trainer's collator, which makes the batch from samples {"input_ids": [...]}.
        lengths: the documents' lengths; None: those that the batch says, by position_ids,
            cu_seq_lens_q, seq_idx, documents or attention_mask.
        mask: what makes the masks that a model of flashtrain's is trained with.
        ranks: 2: compute the loss on two processes as well, which share the row.
        shard: shard(batch, rank, ranks) returns a rank's part for a model that shares sequences by
            itself; None: flashtrain's context parallelism.

    Returns:
        The table; its `faults` are empty if all is well.

    Raises:
        UserError: the model cannot compute the loss of the batch.
    """
    from flashtrain.checks.declared import declared_rows
    from flashtrain.checks.ranks import equals_two

    subject = Subject(model, mask)
    if collator is not None:
        batch, lengths = _collated(collator, vocabulary_of(model), lengths)
    elif batch is None:
        names = OURS if isinstance(model, Trainable) else {}
        batch = made_batch(vocabulary_of(model), LENGTHS, **names)
    modes = [(one, one.training) for one in model.modules()]
    model.eval()
    report = Report()
    try:
        with isolate_rng():
            packed = Packed(batch, lengths)
            if LABELS not in packed.batch:
                raise UserError("a batch without labels: expected 'labels' (rows, tokens).")
            try:
                subject.loss(packed.batch)
            except Exception as error:
                name = type(model).__name__
                raise UserError(f"{name} fails on the batch: {first_line(error)}.") from error
            questions: list[Callable[..., Any]] = [
                positions_restart, labels_within, documents_apart, packed_equals_alone,
                later_unseen, padding_unseen, declared_rows,
            ]  # fmt: skip
            if ranks > 1:
                questions.append(lambda *given: equals_two(*given, ranks, shard))
            for ask in questions:
                report.rows += _answers(ask, subject, packed)
    finally:
        for one, mode in modes:
            one.training = mode
    return report


def _answers(ask: Callable[..., Any], subject: Subject, packed: Packed) -> list[Row]:
    try:
        found = ask(subject, packed)
    except Exception as error:  # noqa: BLE001 - of a model that no one here wrote
        name = getattr(ask, "__name__", "").replace("_", " ")
        return [Row(name, NONE, None, f"cannot be computed: {first_line(error)}")]
    return [found] if isinstance(found, Row) else list(found)


def mask_of(make: MaskMaker, positions: Tensor) -> Any:
    """Return the mask of packed documents with these positions (B, S)."""
    return make(
        documents=(positions == 0).cumsum(1) - 1,
        positions=positions,
        seqlen=positions.shape[1],
        device=positions.device,
    )


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens a model knows: the rows of its first embedding."""
    if isinstance(model, Trainable) and hasattr(model, "shape"):
        return model.shape.vocab_size
    for one in model.modules():
        if isinstance(one, nn.Embedding):
            return one.num_embeddings
    raise UserError(f"{type(model).__name__} has no nn.Embedding: give a batch.")


def _collated(
    collator: Callable[..., Any], vocabulary: int, lengths: Sequence[int] | None
) -> tuple[Mapping[str, Any], Sequence[int] | None]:
    made = made_batch(vocabulary, LENGTHS)["input_ids"][0]
    batch = collator([{"input_ids": one.tolist()} for one in made.split(LENGTHS)])
    found = Packed(batch).tokens.flatten().cpu()
    # Where the collator put them one after the other, whatever it says of them.
    return batch, LENGTHS if lengths is None and torch.equal(found, made) else lengths


def relative(one: Tensor, other: Tensor) -> float:
    """Return how far two losses are apart, relative to them; inf where one is not finite."""
    difference = ((one - other).abs() / one.abs().clamp(min=1e-3)).item()
    return difference if difference == difference else float("inf")


def row(check: str, figure: float, most: float, words: str) -> Row:
    """Return a row that is a fault if its figure is above `most`; then it has these words."""
    return Row(check, FAULT if figure > most else OK, figure, words if figure > most else "")


def positions_restart(subject: Subject, packed: Packed) -> Row:
    """Whether each document's positions begin as its row's do, and count on."""
    title, name = "positions restart", next((x for x in POSITIONS if x in packed.batch), None)
    if name is None:
        return Row(title, NONE, None, "the batch has no positions")
    given = packed.batch[name].cpu()
    wrong = [
        one
        for one in packed.documents
        if not torch.equal(
            given[one.row, one.begin : one.end].long(),
            given[one.row, packed.ids[one.row] >= 0][0] + torch.arange(len(one)),
        )
    ]
    count = f"{len(wrong)} of {len(packed.documents)} documents"
    return (
        Row(title, FAULT, None, f"{count} begin at another position") if wrong else Row(title, OK)
    )


def labels_within(subject: Subject, packed: Packed) -> Row:
    """Whether no document's last token is to predict the next one's first."""
    title, labels = "labels stay within documents", packed.batch[LABELS].cpu()
    if packed.shift is None:
        return Row(title, NONE, None, "labels are not the next tokens")
    firsts = [(one.row, one.begin) for one in packed.documents if one.begin]
    across = [
        place
        for place in firsts
        if labels[place[0], place[1] - packed.shift] != IGNORED
        and packed.ids[place[0], place[1] - 1] >= 0
    ]
    words = f"{len(across)} of {len(firsts)} documents' first tokens are labels of the one before"
    return Row(title, FAULT, None, words) if across else Row(title, OK)


def _difference(
    subject: Subject, before: Batch, after: Batch, packed: Packed, others: Tensor
) -> tuple[float, str | None]:
    """Return how far the losses of two batches are apart, and where a state of one of the `other`
    tokens (B, S) of them first differs."""
    losses: list[Tensor] = []

    def run(again: bool) -> None:
        losses.append(subject.loss(after if again else before))

    one_row = packed.tokens.shape[0] == 1
    _, moved = probe(run, packed.tokens.shape[1], others[0] & one_row, shared=False)
    return relative(*losses), moved


def documents_apart(subject: Subject, packed: Packed) -> Row:
    """Whether the border tokens of a document change no other document's loss."""
    title = "documents apart"
    if len(packed.documents) < 2:
        return Row(title, NONE, None, "the batch has one document")
    worst, words = 0.0, ""
    for one in _some(packed.documents):
        others = (packed.ids >= 0) & ~packed.of(one)
        before = packed.scored(others)
        after = packed.changed(before, one.row, one.begin, one.end - 1)
        figure, moved = _difference(subject, before, after, packed, others)
        if figure > max(worst, EXACT):
            words = f"another document's loss moves{f', by {moved}' if moved else ''}"
        worst = max(worst, figure)
    return row(title, worst, EXACT, words)


def packed_equals_alone(subject: Subject, packed: Packed) -> Row:
    """Whether a document's loss in its row is its loss alone."""
    worst = 0.0
    for one in _some([one for one in packed.documents if len(one) > 2]):
        whole = packed.scored(packed.of(one))
        if (whole[LABELS] != IGNORED).any():
            alone = Packed(packed.alone(one))
            by_itself = alone.scored(alone.of(*alone.documents))
            worst = max(worst, relative(subject.loss(by_itself), subject.loss(whole)))
    words = "a document's loss is another one alone"
    return row("packed equals alone", worst, subject.rounding, words)


def later_unseen(subject: Subject, packed: Packed) -> Row:
    """Whether a token changes no loss of the tokens before it."""
    title = "later tokens unseen"
    if packed.shift is None:
        return Row(title, NONE, None, "labels are not the next tokens")
    one = max(packed.documents, key=len)
    middle = (one.begin + one.end) // 2
    mask = subject.mask and mask_of(subject.mask, packed.batch["positions"])
    if mask is not None and mask.dense().triu(1).any():
        return Row(title, NONE, None, "its mask shows them")
    earlier = packed.of(Document(one.row, one.begin, middle - packed.shift))
    before = packed.scored(earlier)
    figure, moved = _difference(
        subject, before, packed.changed(before, one.row, middle), packed, earlier
    )
    return row(title, figure, EXACT, f"they are seen{f', by {moved}' if moved else ''}")


def padding_unseen(subject: Subject, packed: Packed) -> list[Row]:
    """Whether a document's loss beside padding, on either side, is its loss alone."""
    found = []
    for side in ("left", "right"):
        title, made = f"padding on the {side} unseen", padded(packed, side)
        if isinstance(subject.model, pl.LightningModule | Trainable) or packed.shift != 0:
            found.append(Row(title, NONE, None, "it takes no attention_mask"))
        elif made is not None:
            batch, short = made
            scored = batch.scored(batch.of(short))
            alone = Packed(packed.alone(max(_shorter(packed), key=len)))
            by_itself = subject.loss(alone.scored(alone.of(*alone.documents)))
            figure = relative(by_itself, subject.loss(scored))
            found.append(row(title, figure, subject.rounding, "a document's loss is another one"))
    return found


def _shorter(packed: Packed) -> list[Document]:
    longest = max(map(len, packed.documents))
    return [one for one in packed.documents if len(one) < longest]


def _some(documents: Sequence[Document]) -> Sequence[Document]:
    """Return up to MOST documents, evenly among all."""
    return documents[:: -(-len(documents) // MOST) or 1]
