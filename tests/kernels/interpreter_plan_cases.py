"""The Triton kernels that build plans, in Triton's interpreter: run by test_plan.py in a process of its own. By hand:

TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_plan_cases.py
"""

import pytest
import torch
from mask_cases import TWELVE
from plan_checks import BLOCKS, check_plan, planned_masks

from flashtrain_kernels import masks
from flashtrain_kernels.backends.portable import plan as portable
from flashtrain_kernels.masks.plan import build_plan_reference


@pytest.fixture(autouse=True)
def unwritten_memory_is_poisoned(monkeypatch):
    """Fill what is allocated with a number no table holds, so that an element no kernel writes is seen."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(-77))


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


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 100), (100, 1), (65, 33), (33, 65), (0, 5), (5, 0)])
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
        mask = masks.document(torch.arange(320)[None] // 160, causal=causal).select(torch.arange(320), order)
        check_plan(built(mask, (16,) * 6), mask, (16,) * 6)
