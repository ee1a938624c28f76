"""What several model tests need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashtrain_kernels import Documents, Mask, masks


@pytest.fixture
def documents_of_lengths() -> Callable[..., Documents]:
    """Documents from lengths, one list a row: [3, 5] starts at 0 0 0 3 3 3 3 3 and
    ends at 3 3 3 8 8 8 8 8."""

    def build(*rows: list[int]) -> Documents:
        starts = [
            [sum(row[:i]) for i, length in enumerate(row) for _ in range(length)] for row in rows
        ]
        ends = [
            [sum(row[: i + 1]) for i, length in enumerate(row) for _ in range(length)]
            for row in rows
        ]
        return Documents(
            torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
        )

    return build


@pytest.fixture
def mask_of_lengths(documents_of_lengths) -> Callable[..., Mask]:
    """The mask of documents of these lengths, one list a row: [3, 5] keeps the first 3
    tokens and the next 5 apart."""

    def build(*rows: list[int], causal: bool = True) -> Mask:
        return masks.document(documents_of_lengths(*rows), causal=causal)

    return build
