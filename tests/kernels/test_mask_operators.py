"""The operators that fill masks: the same numbers on every device, and what
torch asks of operators."""

import pytest
import torch
from mask_operator_cases import CASES, CU_SEQLENS, IDS, given

from flashtrain_kernels import masks
from flashtrain_kernels.masks import operators

OPERATORS = torch.ops.flashtrain_kernels


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[8], CASES[10]])
def test_operators_pass_opcheck(case):
    torch.library.opcheck(OPERATORS.document_rows.default, given(case, "rows"))


def test_the_others_pass_opcheck():
    bounds = torch.tensor(CU_SEQLENS[1])
    torch.library.opcheck(OPERATORS.bounds_of_ids.default, (IDS["rows"],))
    torch.library.opcheck(OPERATORS.bounds_of_cu_seqlens.default, (bounds, 45))
    torch.library.opcheck(OPERATORS.packed_rows.default, (bounds, bounds, 45, 45, 3, 0))


def test_masks_of_documents_that_vmap_maps():
    def rows(ids, prefix):
        documents = masks.documents_from_ids(ids)
        return masks.prefix_lm(prefix, documents=documents).queries

    ids, prefix = IDS["rows"].view(2, 2, 70), torch.arange(140).view(2, 70)
    got = torch.vmap(rows, in_dims=(0, None))(ids, prefix)
    assert torch.equal(got, torch.stack([rows(each, prefix) for each in ids]))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [70, 5000])
@pytest.mark.parametrize("documents", ["rows", "gaps", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_the_gpu_fills_the_same_rows_within_documents(case, documents, length):
    arguments = [
        x.repeat(1, -(-length // 70))[:, :length].contiguous() if isinstance(x, torch.Tensor) else x
        for x in given(case, documents)
    ]
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
    got, wanted = OPERATORS.document_rows(*on_gpu), OPERATORS.document_rows(*arguments)
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("total", [0, 45, 3000, 2**20 + 7])
@pytest.mark.parametrize("bounds", CU_SEQLENS)
def test_the_gpu_finds_the_same_sequences(bounds, total):
    bounds = torch.tensor(bounds) * max(total // 45, 1)
    on_gpu = bounds.cuda()
    for got, wanted in zip(
        operators.bounds_of_cu_seqlens(on_gpu, total),
        operators.bounds_of_cu_seqlens(bounds, total),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(got.cpu(), wanted)
    got = operators.packed_rows(on_gpu, on_gpu, total, total, 99, 0)
    assert torch.equal(got.cpu(), operators.packed_rows(bounds, bounds, total, total, 99, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*IDS, "a million tokens"])
def test_the_gpu_finds_the_same_documents(name):
    ids = IDS.get(name, torch.arange(2**20 + 7)[None] // 9999)
    for got, wanted in zip(
        masks.documents_from_ids(ids.cuda()), masks.documents_from_ids(ids), strict=True
    ):
        assert torch.equal(got.cpu(), wanted)
