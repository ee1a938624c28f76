"""The small kernels in Triton's interpreter, run by test_portable.py in a process of its own: they
build the plans and fill the masks that PyTorch's implementations do, number for number, give
torch's cross-entropy, and merge parts of an attention. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_small_cases.py
"""

import pytest
import torch
import torch.nn.functional as F
from mask_cases import TWELVE
from mask_operator_cases import CASES, CU_SEQLENS, IDS, given
from plan_checks import BLOCKS, check_plan, planned_masks

from flashtrain_kernels import linear_cross_entropy, masks, merge_attention, merge_attention_into
from flashtrain_kernels.backends.portable import mask_rows
from flashtrain_kernels.backends.portable import plan as portable
from flashtrain_kernels.masks import rows
from flashtrain_kernels.masks.plan import build_plan_reference


@pytest.fixture(autouse=True)
def small_chunks_and_poisoned_memory(monkeypatch):
    """Chunks so small that rows have many; memory filled with a number no table and no mask holds,
    so that what is not written shows."""
    monkeypatch.setattr(mask_rows, "TOKENS", 16)
    monkeypatch.setattr(mask_rows, "NOTES", 2)
    for where, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        empty = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, empty=empty, **k: empty(*a, **k).fill_(-77))


def built(mask, blocks):
    """The tables by Triton, checked to be those of the PyTorch implementation."""
    tables = portable.plan(mask.queries, mask.keys, mask.seqlen_k, blocks)
    wanted = build_plan_reference(mask.queries, mask.keys, mask.seqlen_k, list(blocks))
    for got, other in zip(tables, wanted, strict=True):
        assert torch.equal(got, other)
    return tables


@pytest.mark.parametrize("name", TWELVE)
def test_plans_visit_every_visible_pair_once(name):
    mask = planned_masks("natural")[name]
    blocks = BLOCKS[TWELVE.index(name) % 3]
    check_plan(built(mask, blocks), mask, blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("order", ["zigzag", "random"])
@pytest.mark.parametrize("name", ["causal document", "shared question"])
def test_any_order_of_tokens_and_any_tile_sizes(name, order, blocks):
    mask = planned_masks(order)[name]
    check_plan(built(mask, blocks), mask, blocks)


@pytest.mark.parametrize("order", ["natural", "zigzag"])
def test_runs_are_counted_across_chunks_of_tiles(order, monkeypatch):
    monkeypatch.setattr(portable, "_CHUNK", 4)
    monkeypatch.setattr(portable, "_TOKENS", 32)
    mask = planned_masks(order)["global window"]
    check_plan(built(mask, (32, 16, 64, 16, 16, 32)), mask, (32, 16, 64, 16, 16, 32))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 100), (100, 1), (65, 33), (33, 65), (0, 5), (5, 0)]
)
def test_unequal_lengths(seqlen_q, seqlen_k):
    blocks = (32, 16, 16, 32, 16, 16)
    for mask in (masks.causal(seqlen_q, seqlen_k), masks.full(seqlen_q, seqlen_k)):
        check_plan(built(mask, blocks), mask, blocks)


def test_packed_sequences_with_empty_ones():
    bounds_q, bounds_k = torch.tensor([0, 20, 20, 61, 80]), torch.tensor([0, 50, 71, 71, 90])
    mask = masks.varlen(bounds_q, bounds_k, 85, 99, causal=True, window=(17, -1))
    check_plan(built(mask, BLOCKS[0]), mask, BLOCKS[0])


def test_more_runs_than_places_leave_nothing_out():
    # Every second tile of keys is of the second document: a query's tiles are a run each.
    order = torch.arange(320).view(2, 10, 16).transpose(0, 1).reshape(-1)
    for causal in (False, True):
        mask = masks.document(torch.arange(320)[None] // 160, causal=causal).select(
            torch.arange(320), order
        )
        check_plan(built(mask, (16,) * 6), mask, (16,) * 6)


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


@pytest.mark.parametrize(
    ("tokens", "rows", "vocab_size", "chunk"), [(7, 50, 47, 3), (3, 9000, 8999, None)]
)
def test_the_kernel_is_torchs_cross_entropy(tokens, rows, vocab_size, chunk):
    hidden, weight = (
        torch.randn(tokens, 16, requires_grad=True),
        torch.randn(rows, 16, requires_grad=True),
    )
    labels = torch.randint(vocab_size, (tokens,))
    labels[0] = -100
    ours = linear_cross_entropy(hidden, weight, labels, vocab_size=vocab_size, chunk=chunk)
    theirs = F.cross_entropy(F.linear(hidden, weight[:vocab_size]), labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(theirs, (hidden, weight))
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, weight)), wanted, rtol=1e-4, atol=1e-5
    )
    upstream = torch.randn(1).expand(tokens)  # as that of a sum
    each = linear_cross_entropy(
        hidden, weight, labels, vocab_size=vocab_size, chunk=chunk, reduction="none"
    )
    theirs = F.cross_entropy(F.linear(hidden, weight[:vocab_size]), labels, reduction="none")
    torch.testing.assert_close(each, theirs, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(theirs, (hidden, weight), upstream)
    torch.testing.assert_close(
        torch.autograd.grad(each, (hidden, weight), upstream), wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_merging_in_place_is_merging_in_float64_and_leaves_rows_alone_that_see_nothing(
    head_dim, dtype
):
    out, part = (torch.randn(2, 45, 3, head_dim, dtype=dtype) for _ in range(2))
    lse, part_lse = (3 * torch.randn(2, 3, 45, dtype=dtype) for _ in range(2))
    lse[:, :, ::5], part_lse[:, :, ::3] = -torch.inf, -torch.inf  # some rows see nothing of both
    out.transpose(1, 2)[:, :, ::5] = 0
    part.transpose(1, 2)[:, :, ::3] = torch.nan  # not read
    before, rows = out.clone(), slice(8, 41)
    wanted, total = merge_attention(
        [(x[:, rows].double(), y[:, :, rows].double()) for x, y in ((out, lse), (part, part_lse))]
    )
    merge_attention_into(
        out[:, rows], lse[:, :, rows], part[:, rows], part_lse[:, :, rows].contiguous()
    )
    torch.testing.assert_close(out[:, rows].double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:, :, rows].double(), total, rtol=1e-5, atol=1e-6)
    unseen = torch.arange(45) % 3 == 0
    unseen[: rows.start], unseen[rows.stop :] = True, True
    assert torch.equal(out[:, unseen], before[:, unseen])
