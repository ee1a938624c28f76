"""Plans: every visible pair visited once, nothing needless where tokens are in order,
on every implementation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import TWELVE
from plain_formula import assert_one_graph_serves
from plan_checks import BLOCKS, ORDERS, check_plan, listed, planned_masks

from flashtrain_kernels import dispatch, masks
from flashtrain_kernels.backends.portable import tile_table
from flashtrain_kernels.masks.plan import PLAN


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TWELVE)
def test_plans_visit_every_visible_pair_once_in_any_order_of_tokens(name, order):
    mask = planned_masks(order)[name]
    for blocks in BLOCKS:
        plan = mask.planned_for(blocks).plan
        needless, masked_needlessly = check_plan(plan[:3], mask, blocks)
        assert plan.blocks == blocks
        if order == "natural":
            assert needless == 0
            # A tile whose rows see it partly by the one interval and partly by the other is
            # not known to be full.
            assert masked_needlessly == 0 or name in ("shared question", "global window")


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5),
    causal=st.booleans(), left=st.integers(-1, 40), right=st.integers(-1, 40),
    tail=st.integers(0, 20),
    seed=st.one_of(st.none(), st.integers(0, 9)), blocks=st.sampled_from(BLOCKS),
)  # fmt: skip
def test_plans_of_packed_sequences_of_any_lengths(lengths, causal, left, right, tail, seed, blocks):
    bounds = torch.tensor([(0, 0), *lengths]).cumsum(0)
    total_q, total_k = (bounds[-1] + tail).tolist()
    mask = masks.varlen(
        bounds[:, 0], bounds[:, 1], total_q, total_k, causal=causal, window=(left, right)
    )
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        mask = mask.select(
            torch.randperm(total_q, generator=generator),
            torch.randperm(total_k, generator=generator),
        )
    check_plan(PLAN(mask.queries, mask.keys, mask.seqlen_k, list(blocks)), mask, blocks)


def test_full_tiles_are_the_interior_of_a_causal_mask_and_the_ragged_last_tile_is_masked():
    forward, _, dkdv = PLAN(masks.causal(100).queries, None, 100, [16] * 6)
    assert listed(forward[0, 3].tolist()) == ([3], [0, 1, 2])
    assert listed(forward[0, 6].tolist()) == ([6], [0, 1, 2, 3, 4, 5])
    assert listed(dkdv[0, 3].tolist()) == ([3, 6], [4, 5])


def test_zigzag_pieces_take_no_more_tiles_than_their_pairs_need():
    pieces = torch.arange(256).tensor_split(8)
    own, other = torch.cat([pieces[1], pieces[6]]), torch.cat([pieces[2], pieces[5]])
    mask = masks.causal(256).select(own, other)
    assert check_plan(mask.planned_for((16,) * 6).plan[:3], mask, (16,) * 6) == (0, 0)


def runs_apart(count):
    """One tile of queries that sees `count` tiles of keys, every second one, by a document
    shared out tile by tile."""
    order = torch.arange(512).view(2, 16, 16).transpose(0, 1).reshape(-1)[: 32 * count]
    return masks.document(torch.arange(512)[None] // 256, causal=False).select(
        torch.arange(16), order
    )


@pytest.mark.parametrize(("count", "full"), [(1, [0]), (2, [0, 2]), (3, [0, 2]), (9, [0, 2])])
def test_full_runs_past_the_second_are_masked_in_one_run_to_the_last_tile(count, full):
    mask = runs_apart(count)
    tables = mask.planned_for((16,) * 6).plan[:3]
    check_plan(tables, mask, (16,) * 6)
    masked = list(range(4, 2 * count - 1))
    assert listed(tables[0][0, 0].tolist()) == (masked, full)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_masked_runs_have_four_places_and_past_them_one_run_takes_the_rest(count):
    mask = runs_apart(count)
    # One query less in the document: every tile of keys needs the mask.
    mask = mask._replace(queries=mask.queries.clone())
    mask.queries[masks.HIGH, 0, 3] = 0
    tables = mask.planned_for((16,) * 6).plan[:3]
    check_plan(tables, mask, (16,) * 6)
    apart = [2 * tile for tile in range(count)]
    wanted = apart if count <= 4 else [*apart[:3], *range(6, 2 * count - 1)]
    assert listed(tables[0][0, 0].tolist()) == (wanted, [])


def test_rows_that_see_nothing_keep_their_tile_from_being_full_and_an_empty_mask_visits_nothing():
    mask = masks.causal(48, 16)
    forward, _, dkdv = PLAN(mask.queries, None, 16, [16] * 6)
    assert [listed(row) for row in forward[0].tolist()] == [([], []), ([], []), ([0], [])]
    assert listed(dkdv[0, 0].tolist()) == ([2], [])


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 20), (20, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlen_q, seqlen_k):
    mask = masks.full(seqlen_q, seqlen_k)
    check_plan(PLAN(mask.queries, None, seqlen_k, [16] * 6), mask, (16,) * 6)


@pytest.mark.parametrize("order", ["natural", "random"])
def test_the_operator_passes_opcheck(order):
    mask = planned_masks(order)["global window"]
    torch.library.opcheck(PLAN, (mask.queries, mask.keys, mask.seqlen_k, [16, 32, 16, 32, 16, 32]))


def test_one_compiled_graph_serves_every_length():
    def plan(ids):
        return masks.document(ids, causal=True).planned_for((32, 16, 16, 32, 16, 16)).plan[:3]

    assert_one_graph_serves(
        plan, [(torch.arange(length)[None] // 30,) for length in (100, 77, 131)]
    )


def test_a_mask_is_planned_once_and_only_where_kernels_run(monkeypatch):
    mask = masks.causal(40)
    with dispatch.force("reference"):
        assert mask.planned(64, torch.float32) is mask
    monkeypatch.setattr(dispatch, "runs_kernels", lambda device: True)
    monkeypatch.setattr(tile_table, "plan_blocks", lambda device, head_dim, dtype, rich: (16,) * 6)
    planned = mask.planned(64, torch.float32)
    assert planned.plan.blocks == (16,) * 6
    assert planned.planned(64, torch.float32) is planned
    monkeypatch.setattr(tile_table, "plan_blocks", lambda device, head_dim, dtype, rich: (32,) * 6)
    assert planned.planned(128, torch.float32).plan.blocks == (32,) * 6


@pytest.mark.parametrize("blocks", [(16,) * 5, (8, 16, 16, 16, 16, 16), (16, 48, 16, 16, 16, 16)])
def test_other_tile_sizes_are_refused(blocks):
    with pytest.raises(ValueError, match="blocks must be six powers of two of at least 16, not "):
        masks.causal(40).planned_for(blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TWELVE)
def test_the_gpu_builds_the_same_plans(name, order):
    mask = planned_masks(order)[name]
    on_gpu = masks.Mask(
        mask.queries.cuda(), None if mask.keys is None else mask.keys.cuda(), mask.seqlen_k
    )
    for blocks in BLOCKS:
        got, wanted = (each.planned_for(blocks).plan for each in (on_gpu, mask))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:3], wanted[:3], strict=True))


@pytest.mark.longest
@pytest.mark.gpu
# One kernel makes all plans, and the CPU takes a minute.
@pytest.mark.parametrize("path", ["portable"], indirect=True)
def test_a_million_tokens_on_the_gpu():
    ids = torch.arange(2**20 + 7)[None] // 9999
    blocks = (128, 128, 128, 128, 128, 128)
    got = (
        masks.sliding_window(ids.shape[1], (5000, 0), documents=ids.cuda()).planned_for(blocks).plan
    )
    mask = masks.sliding_window(ids.shape[1], (5000, 0), documents=ids)
    for a, b in zip(got[:3], mask.planned_for(blocks).plan[:3], strict=True):
        assert torch.equal(a.cpu(), b)


def test_a_compiled_program_plans_for_a_head_dimension_that_is_symbolic(monkeypatch):
    monkeypatch.setattr(dispatch, "runs_kernels", lambda _device: True)  # as on a GPU
    mask = masks.document(torch.arange(64)[None] // 20, causal=True)

    def planned(x, mask):
        plan = mask.planned(x.shape[-1], x.dtype).plan
        return x * 2 + plan.forward.sum() + plan.blocks[0]

    compiled = torch.compile(planned, fullgraph=True, dynamic=True, backend="eager")
    for head_dim in (64, 128, 40):
        x = torch.ones(2, head_dim, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, mask), planned(x, mask))
