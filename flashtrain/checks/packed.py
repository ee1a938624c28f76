"""A batch with its documents, and what a check changes in it.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context.batch import LABELS, TOKENS, documents_in
from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

POSITIONS = ("positions", "position_ids")
# 131 tokens, a prime, which no other dimension of a model is (token_probe).
LENGTHS = (37, 5, 64, 1, 24)
_BOUNDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")

Batch = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """Where a document lies: its row, and its tokens from `begin` up to `end`."""

    row: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


class Packed:
    """A batch of documents, found by what it says of them.

    Args:
        batch: tensors (B, S) by name, "input_ids" or "tokens" among them.
        lengths: the lengths of the documents of all rows in order, in place of what it says.
    """

    def __init__(self, batch: Mapping[str, Any], lengths: Sequence[int] | None = None) -> None:
        self.name = next((name for name in TOKENS if name in batch), "")
        if not self.name:
            raise UserError(
                f"a batch of {', '.join(map(str, batch))}: expected a dictionary with 'input_ids' "
                "or 'tokens' (rows, tokens)."
            )
        self.batch: Batch = dict(batch)
        self.tokens: Tensor = batch[self.name]
        rows, length = self.tokens.shape
        ids = torch.arange(rows)[:, None] * length + torch.zeros(1, length, dtype=torch.int64)
        if lengths is not None:
            own = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            ids = ids + torch.nn.functional.pad(own, (0, ids.numel() - len(own)), value=-1).view(
                rows, -1
            )
        elif (found := documents_in(self._named(), "documents", length)) is not None:
            ids = ids + found
        padding = batch.get("attention_mask")
        if isinstance(padding, Tensor) and padding.dim() == 2:
            ids = torch.where(padding.cpu() > 0, ids, -1)
        self.ids = ids  # the number of each token's document, below 0 for padding
        self.documents = [
            Document(row, part[0][0], part[-1][0] + 1)
            for row in range(rows)
            for number, each in groupby(enumerate(ids[row].tolist()), key=lambda one: one[1])
            if number >= 0 and (part := list(each))
        ]
        # How far ahead of its token a label stands: 0 as in transformers, 1 as in flashtrain, None
        # where labels are other things than the next tokens.
        self.shift = self._shift()

    def _named(self) -> Batch:
        """Return the batch with flashtrain's and mamba_ssm's names as transformers'."""
        positions = next((self.batch[name] for name in POSITIONS if name in self.batch), None)
        ids = self.batch.get("documents", self.batch.get("seq_idx"))
        return {**self.batch, "position_ids": positions, "documents": ids}

    def _shift(self) -> int | None:
        labels = self.batch.get(LABELS)
        for shift in (0, 1) if isinstance(labels, Tensor) else ():
            there = labels[:, : labels.shape[1] - shift]
            same = there == self.tokens[:, shift:]
            if same[there != IGNORED].float().mean() > 0.9:
                return shift
        return None

    def scored(self, where: Tensor) -> Batch:
        """Return the batch with labels only `where` (B, S); never of a document's first token,
        which the token before it would predict."""
        if self.shift == 0:
            where = where.clone()
            for one in self.documents:
                where[one.row, one.begin] = False
        where = where.to(self.tokens.device)
        return {**self.batch, LABELS: self.batch[LABELS].masked_fill(~where, IGNORED)}

    def of(self, *documents: Document) -> Tensor:
        """Return whether each token (B, S) is of one of these documents."""
        found = torch.zeros(self.ids.shape, dtype=torch.bool)
        for one in documents:
            found[one.row, one.begin : one.end] = True
        return found

    def changed(self, batch: Batch, row: int, *places: int) -> Batch:
        """Return the batch with other tokens at these places of a row."""
        tokens = self.tokens.clone()
        for place in places:
            tokens[row, place] += 1 if tokens[row, place] < 2 else -1
        return {**batch, self.name: tokens}

    def of_one(self, vocabulary: int, tokens: int) -> Batch:
        """Return a batch of one document of random tokens, with this one's names."""
        names = {"tokens": self.name, "shift": self.shift or 0}
        names |= {"positions": name for name in POSITIONS if name in self.batch}
        made = made_batch(vocabulary, (tokens,), **names)
        return {name: x for name, x in made.items() if name in self.batch}

    def alone(self, document: Document) -> Batch:
        """Return a batch of one document, whose positions begin as its row's do."""
        row, begin, end = document.row, document.begin, document.end
        found: Batch = {}
        for name, x in self.batch.items():
            if name in _BOUNDS:
                x = x.new_tensor([0, len(document)])
            elif name in _LONGEST:
                x = len(document)
            elif isinstance(x, Tensor) and x.shape[:2] == self.tokens.shape:
                x = x[row : row + 1, begin:end]
                if name in POSITIONS:
                    first = self.batch[name][row, self.ids[row] >= 0][0]
                    x = first + torch.arange(len(document), device=x.device)[None].to(x)
                elif name in ("documents", "seq_idx"):
                    x = torch.zeros_like(x)
            found[name] = x
        return found


def padded(packed: Packed, side: str) -> tuple[Packed, Document] | None:
    """Return a batch of the two longest documents of different lengths, the shorter one padded on
    this side, and the shorter; None where all are of one length."""
    long = max(packed.documents, key=len)
    short = max((one for one in packed.documents if len(one) < len(long)), key=len, default=None)
    if short is None or len(short) < 3:
        return None
    width, rows = len(long), []
    for one in (short, long):
        gap, own = width - len(one), packed.alone(one)
        left = gap if side == "left" else 0
        around = torch.nn.functional.pad
        tokens, labels = own[packed.name], own[LABELS]
        mask = torch.ones_like(tokens)
        sides = (left, gap - left)
        mask = around(mask, sides)
        rows.append(
            {
                packed.name: around(tokens, sides, value=3),
                LABELS: around(labels, sides, value=IGNORED),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            }
        )
    batch = {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
    left = width - len(short) if side == "left" else 0
    return Packed(batch), Document(0, left, left + len(short))


def made_batch(
    vocabulary: int,
    lengths: Sequence[int],
    *,
    tokens: str = "input_ids",
    positions: str = "position_ids",
    shift: int = 0,
) -> Batch:
    """Return a row of documents of random tokens, under these names; for `shift` see Packed."""
    draws = torch.Generator().manual_seed(0)
    made = torch.randint(4, vocabulary, (1, sum(lengths)), generator=draws)
    places = torch.cat([torch.arange(one) for one in lengths])[None]
    labels = torch.nn.functional.pad(made.masked_fill(places == 0, IGNORED), (0, 1), value=IGNORED)
    return {tokens: made, LABELS: labels[:, shift:][:, : made.shape[1]], positions: places}


OURS: dict[str, Any] = {"tokens": "tokens", "positions": "positions", "shift": 1}
