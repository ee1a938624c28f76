"""One batch of sequences in both layouts: padded rows, and one packed row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 50


class Both(NamedTuple):
    """The arguments of Bert.loss, for the same sequences and labels."""

    padded: dict[str, Tensor]
    packed: dict[str, Tensor]


def batch_of(lengths: Sequence[int], *, spare: int = 3, device: str = "cpu") -> Both:
    """A batch of random sequences of these lengths; packed, with `spare` tokens,
    sequences and labels too many.

    A masked position in each sequence: its middle. Padding, and spare tokens, are random
    too: they must not matter.
    """
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    rows, longest, total = len(lengths), max(lengths), sum(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    tokens, segments = draw(rows, longest), draw(rows, longest) % 2
    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    middles = torch.tensor(lengths) // 2
    labels = draw(rows)
    padded = {
        "tokens": tokens,
        "segments": segments,
        "lengths": torch.tensor(lengths),
        "masked": torch.arange(rows) * longest + middles,
        "labels": labels,
    }
    none = torch.full((spare,), -100)
    packed = {
        "tokens": torch.cat((tokens[real], draw(spare))),
        "segments": torch.cat((segments[real], draw(spare) % 2)),
        "cu_seqlens": torch.tensor([0, *ends.tolist(), *[total] * spare], dtype=torch.int32),
        "masked": torch.cat((begins + middles, torch.zeros(spare, dtype=torch.int64))),
        "labels": torch.cat((labels, none)),
    }
    return Both(
        *({name: x.to(device) for name, x in layout.items()} for layout in (padded, packed))
    )
