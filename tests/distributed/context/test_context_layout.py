"""Layouts: every token is held once, by ranks that hold equally many and work equally long."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.distributed.context.layouts import LAYOUTS, balanced, contiguous
from flashtrain.distributed.context.needed_keys import (
    fetched_share,
    needed_keys,
    outward_queries,
    own_keys,
)
from flashtrain.distributed.context.work import attention_work, imbalance, visible_keys
from flashtrain_kernels import masks

LENGTH, DEGREE = 131072, 8


def documents(lengths, total):
    """(1, total) ids of documents of these lengths, the last one cut."""
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[:total])[None]


def heavy_tailed(seed: int, total: int = LENGTH) -> torch.Tensor:
    """Lengths from a log-normal (median 665 tokens), or with an odd seed from a Pareto
    distribution without a mean."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(6.5, 1.6, total) if seed % 2 else (rng.pareto(0.9, total) + 1) * 200
    lengths = drawn.clip(1, total).astype(int)
    return documents(lengths[: int(np.searchsorted(lengths.cumsum(), total)) + 1], total)


def test_work_on_heavy_tailed_documents_is_even_where_other_layouts_are_not():
    found = {"balanced": [], "zigzag": [], "contiguous": []}
    for seed in range(6):
        mask = masks.document(heavy_tailed(seed), causal=True)
        costs = visible_keys(mask)
        for name, values in found.items():
            values.append(imbalance(attention_work(LAYOUTS[name](mask, DEGREE), costs)))
    assert max(found["balanced"]) <= 1.05
    assert np.mean(found["zigzag"]) > 1.4
    assert np.mean(found["contiguous"]) > 1.8


@pytest.mark.parametrize("name", ["full", "causal", "window", "global"])
def test_work_of_a_single_sequence_is_even(name):
    mask = {
        "full": masks.full(8192),
        "causal": masks.causal(8192),
        "window": masks.sliding_window(8192, (500, 0)),
        "global": masks.global_window(8192, 64, (256, 0), causal=True),
    }[name]
    assert imbalance(attention_work(balanced(mask, DEGREE), visible_keys(mask))) <= 1.05


def test_short_documents_stay_on_one_rank():
    ids = documents([200] * 700, LENGTH)
    mask = masks.document(ids, causal=True)
    layout = balanced(mask, DEGREE)
    cut = sum(
        int((np.bincount(ids[0, layout.tokens[0, rank]], minlength=700) % 200 > 0).sum())
        for rank in range(DEGREE)
    )
    # Sharded block by block, nearly every block of 256 would cut a document of 200.
    assert cut < 0.35 * LENGTH / layout.block
    scattered = attention_work(layout, visible_keys(mask))
    assert imbalance(scattered) <= 1.02
    assert fetched_share(needed_keys(layout, mask), layout.held) < 0.2 / (DEGREE - 1)


def test_long_documents_stay_on_one_rank_too_where_the_work_stays_even():
    """A rank then needs a part of other ranks' keys only; with every block sharded by
    itself it needs nearly all."""
    for seed, most in ((1, 0.3), (5, 0.3)):
        mask = masks.document(heavy_tailed(seed), causal=True)
        layout = balanced(mask, DEGREE)
        assert fetched_share(needed_keys(layout, mask), layout.held) < most
        assert imbalance(attention_work(layout, visible_keys(mask))) <= 1.05


def test_ranks_fetch_next_to_nothing_where_documents_can_stay_whole():
    """No document ends in a piece that another rank holds with the next document: it
    would be fetched whole."""
    rng = np.random.default_rng(0)
    mask = masks.document(documents(rng.integers(1000, 9000, 40), LENGTH), causal=True)
    for degree in (2, 4):
        layout = balanced(mask, degree)
        assert fetched_share(needed_keys(layout, mask), layout.held) < 0.05
        assert imbalance(attention_work(layout, visible_keys(mask))) <= 1.05
        assert layout.padding == 0


def test_under_a_window_a_rank_fetches_what_the_window_reaches_of_its_neighbors_tokens():
    mask = masks.sliding_window(LENGTH, (1023, 0))
    needed = needed_keys(balanced(mask, DEGREE), mask)
    assert [sum(map(len, of_rank)) for of_rank in needed] == [0] + [1023] * (DEGREE - 1)


def test_what_a_rank_needs_from_others_is_counted():
    def counts(mask):
        return [sum(map(len, of_rank)) for of_rank in needed_keys(contiguous(mask, 4), mask)]

    mask = masks.sliding_window(64, (3, 0))
    # Each rank but the first sees the last three keys of the one before.
    assert counts(mask) == [0, 3, 3, 3]
    assert counts(masks.full(64)) == [48] * 4
    # Two intervals a query: the first two tokens besides.
    assert counts(masks.global_window(64, 2, (3, 0), causal=True)) == [0, 5, 5, 5]
    needed = needed_keys(contiguous(mask, 4), mask)
    assert needed[2][1].tolist() == [13, 14, 15]  # of the 16 that rank 1 holds
    assert [len(places) for places in needed[2]] == [0, 3, 0, 0]
    assert fetched_share(needed, 16) == 3 / 48


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_queries_that_see_other_ranks_keys_are_those_of_the_mask(name):
    ids = torch.cat((documents([5, 1, 9, 12], 27), documents([20, 7], 27)))
    for mask in (
        masks.document(ids, causal=True),
        masks.global_window(27, 2, (3, 0), causal=True),
        masks.full(27),
    ):
        layout, seen = LAYOUTS[name](mask, 4), mask.dense()
        rows = max(len(seen), len(layout.tokens))
        for rank in range(4):
            wanted = set()
            for of_mask, tokens in zip(
                seen.expand(rows, -1, -1), layout.tokens.expand(rows, -1, -1), strict=True
            ):
                own = tokens[rank][tokens[rank] >= 0]
                others = torch.ones(27, dtype=torch.bool).index_fill(0, own, False)
                wanted |= set(of_mask[own][:, others].any(1).nonzero()[:, 0].tolist())
            asked, keys = outward_queries(layout, mask, rank), set()
            assert asked.tolist() == sorted(wanted)
            for of_mask, tokens in zip(
                seen.expand(rows, -1, -1), layout.tokens.expand(rows, -1, -1), strict=True
            ):
                queries = tokens[rank, asked][tokens[rank, asked] >= 0]
                visible = (
                    of_mask[queries].any(0) if len(queries) else torch.zeros(27, dtype=torch.bool)
                )
                keys |= {
                    place
                    for place, token in enumerate(tokens[rank].tolist())
                    if token >= 0 and visible[token]
                }
            assert own_keys(layout, mask, rank, asked).tolist() == sorted(keys)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    degree=st.integers(1, 5),
    name=st.sampled_from(sorted(LAYOUTS)),
)
def test_every_token_is_held_once_and_comes_back(lengths, degree, name):
    total = sum(lengths)
    ids = documents(lengths, total)
    mask = masks.document(torch.cat((ids, ids.flip(1))), causal=True)
    layout = LAYOUTS[name](mask, degree)
    for row in layout.tokens:
        held = row[row >= 0]
        assert torch.equal(held.sort().values, torch.arange(total))
        for of_rank in row:
            real = of_rank[of_rank >= 0]
            assert bool((real.diff() > 0).all())
            assert bool((of_rank[len(real) :] == -1).all())
    x = torch.stack((torch.arange(total), torch.arange(total) * 3))
    parts = [layout.shard(x, rank, fill=-7) for rank in range(degree)]
    assert torch.equal(layout.unshard(parts), x)
    assert sum(int((part == -7).sum()) for part in parts) == 2 * layout.padding
    assert layout.padding == degree * layout.held - total


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), degree=st.integers(1, 8))
def test_blocks_that_divide_leave_no_padding(seed, degree):
    length = degree * 256 * (1 + seed % 5)
    assert balanced(masks.causal(length), degree).padding == 0


@pytest.mark.parametrize("kind", ["document", "global", "shared question", "blockwise"])
def test_costs_are_the_keys_that_are_seen(kind):
    ids = documents([5, 1, 9, 12], 27)
    segments = torch.arange(27)[None] // 4
    mask = {
        "document": masks.document(ids, causal=True),
        "global": masks.global_window(27, 3, (4, 2), documents=ids),
        "shared question": masks.shared_question(segments, documents=ids),
        "blockwise": masks.causal_blockwise(segments),
    }[kind]
    assert torch.equal(visible_keys(mask), mask.dense().sum(-1))
