"""A batch with its documents, and what a check changes in it. Shapes: B rows, S tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtrain.distributed.context.batch import LABELS, TOKENS, documents_in
from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

POSITIONS = ("positions", "position_ids")
# The names of tokens and positions, and how far before its token a label stands.
THEIRS, OURS = ("input_ids", "position_ids", 0), ("tokens", "positions", 1)
# 131 tokens, a prime, which no other dimension of a model is (token_probe).
LENGTHS = (37, 5, 64, 1, 24)
# How far losses are apart whose sums are of other sizes, in 32 and in 16 bits.
ROUNDING, ROUNDING_16 = 1e-4, 2e-2

Batch = dict[str, Any]


class Document(NamedTuple):
    """A document's row, and its tokens from `begin` up to `end`."""

    row: int
    begin: int
    end: int


class Packed:
    """A batch with the documents that it holds; `rounding` is how far a model's losses of it may be
    apart.

    Args:
        batch: tensors (B, S) by name: "input_ids" or "tokens", "labels" and others.
        lengths: the lengths of all documents in order; None: those that the batch says.
    """

    def __init__(self, batch: Mapping[str, Any], lengths: Sequence[int] | None = None) -> None:
        self.batch: Batch = dict(batch)
        self.rounding = ROUNDING
        self.name = next((name for name in TOKENS if name in batch), "")
        self.positions = next((name for name in POSITIONS if name in batch), "")
        if not self.name or not isinstance(batch.get(LABELS), Tensor):
            raise UserError(
                f"a batch of {', '.join(map(str, batch))}: expected a dictionary of tensors, "
                "'input_ids' or 'tokens', and 'labels' (rows, tokens)."
            )
        tokens, labels = batch[self.name].cpu(), batch[LABELS].cpu()
        says = {"documents": batch.get("seq_idx"), "position_ids": batch.get(self.positions)}
        ids = documents_in({**says, **batch}, "documents", tokens.shape[1])
        if lengths is not None:
            if sum(lengths) != tokens.numel():
                raise UserError(f"lengths of {sum(lengths)} tokens: expected {tokens.numel()}.")
            ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        padding = batch.get("attention_mask")
        ids = torch.zeros((), dtype=torch.int64) if ids is None else ids.view(-1, tokens.shape[1])
        ids = ids.expand_as(tokens)
        if isinstance(padding, Tensor) and padding.shape == tokens.shape:  # no mask of pairs
            ids = torch.where(padding.cpu() > 0, ids, -1)
        self.documents = [
            Document(row, int(end - count), int(end))
            for row in range(len(ids))
            for number, count, end in _runs(ids[row])
            if number >= 0  # no padding
        ]
        # None where labels are not the next tokens.
        self.shift = next((one for one in (0, 1) if _is_next(tokens, labels, one)), None)

    def of(self, *documents: Document) -> Tensor:
        """Return which tokens (B, S) are of these documents."""
        found = torch.zeros(self.batch[self.name].shape, dtype=torch.bool)
        for row, begin, end in documents:
            found[row, begin:end] = True
        return found

    def scored(self, *documents: Document) -> Batch:
        """Return the batch with labels in these documents alone; none of a first token, which the
        document before would predict."""
        own = (one._replace(begin=one.begin + (self.shift == 0)) for one in documents)
        labels = self.batch[LABELS]
        return {**self.batch, LABELS: labels.masked_fill(~self.of(*own).to(labels.device), IGNORED)}

    def alone(self, document: Document) -> Batch:
        """Return a batch of one document, whose positions begin as its row's do."""
        row, begin, end = document
        found: Batch = {}
        for name, x in self.batch.items():
            if name.startswith("cu_seq_lens"):
                x = x.new_tensor([0, end - begin])
            elif name.startswith("max_length"):
                x = end - begin
            elif isinstance(x, Tensor) and x.shape[:2] == self.batch[self.name].shape:
                x = x[row : row + 1, begin:end]
                first = next(one.begin for one in self.documents if one.row == row)
                if name == self.positions:
                    x = self.batch[name][row, first] + torch.arange(end - begin).to(x)[None]
            found[name] = x
        return found

    def of_one(self, vocabulary: int, tokens: int) -> Batch:
        """Return a batch of one document of random tokens, with this one's names and numbers."""
        made = made_batch(vocabulary, (tokens,), (self.name, self.positions, self.shift or 0))
        # As a loss's weight, but not max_length_q.
        own = {n: x for n, x in self.batch.items() if isinstance(x, int | float) and n[:3] != "max"}
        return own | {name: x for name, x in made.items() if name in self.batch}


def _runs(ids: Tensor) -> zip:
    numbers, counts = ids.unique_consecutive(return_counts=True)
    return zip(numbers, counts, counts.cumsum(0), strict=True)


def _is_next(tokens: Tensor, labels: Tensor, shift: int) -> bool:
    labels = labels[:, : labels.shape[1] - shift]
    same = (labels == tokens[:, shift:])[labels != IGNORED]
    return bool(same.double().mean() > 0.9)


def made_batch(
    vocabulary: int, lengths: Sequence[int], names: tuple[str, str, int] = THEIRS
) -> Batch:
    """Return a row of documents of random tokens, under these names."""
    tokens, positions, shift = names
    draws = torch.Generator().manual_seed(0)
    made = torch.randint(4, vocabulary, (1, sum(lengths)), generator=draws)
    places = torch.cat([torch.arange(one) for one in lengths])[None]
    labels = pad(made.masked_fill(places == 0, IGNORED), (0, shift), value=IGNORED)[:, shift:]
    ids = {"documents": (places == 0).cumsum(1) - 1} if shift else {}
    return {tokens: made, LABELS: labels, positions: places, **ids}
