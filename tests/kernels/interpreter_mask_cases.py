"""The Triton kernels that fill masks, in Triton's interpreter: run by test_mask_operators.py in a process of its own.

By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_mask_cases.py
"""

import pytest
import torch
from mask_operator_cases import CASES, CU_SEQLENS, IDS, given

from flashtrain_kernels.backends.portable import mask_rows
from flashtrain_kernels.masks import rows


@pytest.fixture(autouse=True)
def small_chunks_and_poisoned_memory(monkeypatch):
    """Chunks so small that rows have many; memory filled with a number no mask holds, so that what is left shows."""
    monkeypatch.setattr(mask_rows, "TOKENS", 16)
    monkeypatch.setattr(mask_rows, "NOTES", 2)
    for where, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        empty = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, empty=empty, **k: empty(*a, **k).fill_(-77))


def check(name, *arguments):
    """An operator by Triton is that by PyTorch, number for number."""
    got, wanted = getattr(mask_rows, name)(*arguments), getattr(rows, name)(*arguments)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype == torch.int32
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", IDS)
def test_documents_from_numbers(name):
    check("bounds_of_ids", IDS[name])


@pytest.mark.parametrize("total", [0, 1, 16, 45])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", CU_SEQLENS)
def test_documents_from_cumulative_lengths(bounds, dtype, total):
    check("bounds_of_cu_seqlens", torch.tensor(bounds, dtype=dtype), total)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("documents_of", ["rows", "gaps", "whole"])
def test_rows_of_masks_within_documents(case, documents_of):
    check("document_rows", *given(case, documents_of))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (0, 5), (2**40, 2**40)])
@pytest.mark.parametrize("bounds", CU_SEQLENS)
def test_rows_of_packed_sequences(bounds, window):
    of_keys = [2 * bound for bound in bounds[:-1]] + [bounds[-1] + 3]
    check("packed_rows", torch.tensor(bounds), torch.tensor(of_keys), 45, 61, *window)
