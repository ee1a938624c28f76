"""What bert-speed trains: a BERT of one size at one dropout, on full rows or on sequences of a text's lengths, and how
each implementation batches these.

N sequences, S tokens of the longest, B rows of a padded batch, T tokens of a packed one, M labels of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain.data.masking import masked_count
from flashtrain.data.token_budget import rows_once
from flashtrain.errors import UserError
from flashtrain.models.bert_encoder import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.build import make_masked_data
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.step_benchmark.training_step import WeightsHeld

SHARE = 0.15
IGNORED = -100
WIDTHS = 64  # a padded batch is as wide as its longest row, rounded up to this: few shapes, for what compiles
_ROUNDED = 128
# The width of batches: padding, in a table's words.
FULL, RANDOM, BUCKETS, PACKED = "full rows", "random batches", "length buckets", "packed"


@dataclass(frozen=True)
class Sequences:
    """tokens (N, S) int64, 0 after a sequence's end; labels as tokens, -100 where nothing is masked; lengths (N,)."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray

    @property
    def masked(self) -> int:
        """Labels of all sequences."""
        return int((self.labels != IGNORED).sum())

    @classmethod
    def draw(cls, lengths: np.ndarray, vocab_size: int, seed: int, width: int | None = None) -> Sequences:
        """Random tokens of these lengths, with labels at as many random places as MLM masks. width: S, at least."""
        random = np.random.RandomState(seed)
        shape = (len(lengths), max(int(lengths.max()), width or 1))
        real = np.arange(shape[1]) < lengths[:, None]
        tokens = np.where(real, random.randint(5, vocab_size, shape), 0)
        order = np.where(real, random.random_sample(shape), 2.0).argsort(axis=1).argsort(axis=1)
        chosen = order < masked_count(np.maximum(lengths - 2, 1), SHARE)[:, None]
        labels = np.where(chosen & real, random.randint(5, vocab_size, shape), IGNORED)
        return cls(tokens, labels, lengths)

    @classmethod
    def of_tensors(cls, tokens: Tensor, labels: Tensor) -> Sequences:
        """Back from two tensors (N, S): no drawn token is 0."""
        rows = tokens.cpu().numpy()
        return cls(rows, labels.cpu().numpy(), (rows != 0).sum(1))


def padded_batches(drawn: Sequences, rows: int) -> list[np.ndarray]:
    """The sequences of each batch, `rows` at a time in the order they were drawn in."""
    return [np.arange(begin, min(begin + rows, len(drawn.lengths))) for begin in range(0, len(drawn.lengths), rows)]


def bucket_batches(drawn: Sequences, tokens: int) -> list[np.ndarray]:
    """Sequences of like length together, as many as hold `tokens` with their padding."""
    widths = rounded(drawn.lengths, WIDTHS)
    found = []
    for width in np.unique(widths):
        of_width = np.flatnonzero(widths == width)
        rows = max(1, tokens // int(width))
        found += [of_width[begin : begin + rows] for begin in range(0, len(of_width), rows)]
    return found


def packed_batches(drawn: Sequences, tokens: int) -> tuple[list[np.ndarray], int]:
    """(sequences of each row, T): rows without padding of at most `tokens`, all as full as their number allows."""
    total, longest = int(drawn.lengths.sum()), int(drawn.lengths.max())
    rows = -(-total // tokens)
    while True:
        even = -(-total // rows)
        for slack in (1.0, 1.005, 1.02, 1.05, 1.1):
            budget = max(int(rounded(np.array(even * slack), _ROUNDED)), longest)
            budget = min(budget, max(tokens, longest))
            planned = [np.array(row[0]) for row in rows_once(drawn.lengths, budget=budget, ranks=1)]
            if len(planned) <= rows:
                return planned, budget
        rows += 1


def padded_arguments(drawn: Sequences, members: np.ndarray, device: torch.device) -> dict[str, Any]:
    """A padded batch: tokens (B, S), labels (B, S), lengths (B,), and `full`: whether no row is padded."""
    width = min(int(rounded(drawn.lengths[members].max(), WIDTHS)), drawn.tokens.shape[1])
    lengths = drawn.lengths[members]
    return {
        "tokens": _on(drawn.tokens[members, :width], device),
        "labels": _on(drawn.labels[members, :width], device),
        "lengths": _on(lengths, device),
        "full": bool((lengths == width).all()),
    }


def masked_batches(
    drawn: Sequences, batches: Sequence[np.ndarray], device: torch.device, *, budget: int | None
) -> list[dict[str, Any]]:
    """What models.Bert.loss takes of each batch. budget: T of packed rows; None: padded rows.

    There is room for as many labels, and of packed rows as many sequences, as the fullest batch has: few shapes.
    """
    most = max(len(members) for members in batches)
    most_labels = max(int((drawn.labels[members] != IGNORED).sum()) for members in batches)
    if budget is None:
        return [_masked_padded(padded_arguments(drawn, members, device), most_labels) for members in batches]
    return [_masked_packed(drawn, members, device, budget, most, most_labels) for members in batches]


def rounded(value: Any, multiple: int) -> Any:
    """Up to a multiple, as whole numbers."""
    return (-(-np.asarray(value) // multiple) * multiple).astype(np.int64)


def _masked_padded(batch: dict[str, Any], most_labels: int) -> dict[str, Any]:
    flat = batch["labels"].flatten()
    masked = (flat != IGNORED).nonzero()[:, 0]
    fill = (0, most_labels - len(masked))
    found = {
        "tokens": batch["tokens"],
        "masked": torch.nn.functional.pad(masked, fill),
        "labels": torch.nn.functional.pad(flat[masked], fill, value=IGNORED),
        "label_count": torch.tensor(float(max(1, len(masked))), device=flat.device),
    }
    return found if batch["full"] else {**found, "lengths": batch["lengths"]}


def _masked_packed(
    drawn: Sequences, members: np.ndarray, device: torch.device, budget: int, most: int, most_labels: int
) -> dict[str, Any]:
    real = np.arange(drawn.tokens.shape[1]) < drawn.lengths[members][:, None]
    tokens, labels = drawn.tokens[members][real], drawn.labels[members][real]
    masked = np.flatnonzero(labels != IGNORED)
    ends = np.full(most + 1, len(tokens), dtype=np.int32)
    ends[: len(members) + 1] = np.concatenate(([0], drawn.lengths[members].cumsum()))
    fill = most_labels - len(masked)
    return {
        "tokens": _on(np.pad(tokens, (0, budget - len(tokens))), device),
        "cu_seqlens": _on(ends, device),
        "masked": _on(np.pad(masked, (0, fill)), device),
        "labels": _on(np.pad(labels[masked], (0, fill), constant_values=IGNORED), device),
        "label_count": torch.tensor(float(max(1, len(masked))), device=device),
    }


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


VOCAB_SIZE = 30528  # BERT's 30,522 rounded up to a multiple of 64, for every implementation alike


@dataclass(frozen=True)
class BertCase(WeightsHeld):
    """size, family-bert's; context: S. unit: "" for full rows, or what the lengths are of. lengths: (N,) of those.

    activation: "gelu" (the tanh form) or "gelu_exact", of every implementation.
    """

    size: str
    context: int
    unit: str
    dropout: float
    weights: str
    activation: str = "gelu"
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"full rows of {self.context}" if not self.unit else f"{self.unit}s up to {self.context}"
        return f"{self.model}, {what}, dropout {self.dropout:g}, weights {self.weights}"

    @property
    def model(self) -> str:
        """Such as bert-large."""
        return f"bert-{self.size}"

    def config(self) -> BertConfig:
        """The shape that every implementation builds: masked head, no pooler."""
        context = max(512, self.context)  # rows of the position table, as BERT has them
        made = BertConfig.of_size(
            self.size, vocab_size=VOCAB_SIZE, context=context, dropout=self.dropout, activation=self.activation
        )
        return replace(made, vocab_rows=VOCAB_SIZE)

    def lengths_of(self, batch: int) -> np.ndarray:
        """(N,): of the sequences of a call; `batch` full rows, or all of the text's lengths."""
        return np.array(self.lengths, dtype=np.int64) if self.unit else np.full(batch, self.context, dtype=np.int64)

    def draw(self, batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels (N, S) int64 in main memory, from where each implementation batches them."""
        drawn = Sequences.draw(self.lengths_of(batch), VOCAB_SIZE, seed)
        return torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.labels)

    def flops_of(self, batch: int) -> float:
        """Model FLOPs of a call by the real lengths: nothing counts for padding."""
        lengths = self.lengths_of(batch)
        return self.config().flops(lengths.tolist(), int(masked_count(np.maximum(lengths - 2, 1), SHARE).sum()))

    def flops_per_token(self) -> float:
        """Of a token of a full row."""
        return self.flops_of(1) / self.context if not self.unit else self.flops_of(1) / sum(self.lengths)


def cases(settings: Settings) -> list[BertCase]:
    """Every size, precision, dropout and length asked for; those of a text without its lengths yet."""
    asked = settings.benchmark
    activation = settings.bert.activation or "gelu"
    if settings.bert.family != "bert" or activation not in ("gelu", "gelu_exact"):
        raise UserError(
            f"bert.family={settings.bert.family} with {activation}: Hugging Face's BERT has neither; choose "
            "bert.family=bert, with bert.activation=gelu or gelu_exact."
        )
    longest = max(asked.contexts, default=settings.context)
    kinds = [(context, "") for context in asked.contexts] + [(longest, unit) for unit in asked.units]
    return [
        BertCase(size, context, unit, dropout, weights, activation)
        for size in asked.models
        for weights in asked.weights
        for dropout in asked.dropouts
        for context, unit in kinds
    ]


def with_lengths(case: BertCase, settings: Settings, hardware: Hardware) -> BertCase:
    """The case with lengths drawn from the text's: of its units, [CLS] and [SEP] included."""
    if not case.unit:
        return case
    told = settings.having(
        context=case.context,
        masked=replace(
            settings.masked, unit=case.unit, token_budget=max(case.context, settings.masked.token_budget or 0)
        ),
    )
    data = make_masked_data(told, hardware)
    data.setup()
    lengths = data.pieces(data.split.training).lengths + 2
    random = np.random.RandomState(settings.seed)
    drawn = random.choice(lengths, settings.benchmark.samples)
    say(
        f"{case.unit}s of {data.source.describe()} in {data.tokenizer.describe()}: {lengths.mean():.0f} tokens in the "
        f"mean, {drawn.mean():.0f} of the {len(drawn):,} drawn"
    )
    return replace(case, lengths=tuple(int(length) for length in drawn))
