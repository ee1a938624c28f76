"""Block masks: the lists against the pattern and the band, pair by pair; the
patterns; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain_kernels import flash_attn_func, masks
from flashtrain_kernels.masks.block_sparse import (
    block_mask,
    butterfly,
    local_global,
    random,
    sliding_tiles,
    tile_order,
)


def rule(blocks, size, seqlen_q, seqlen_k, causal, window):
    """(Bm, Hm, Sq, Sk) bool, by each pair's block and flash-attn's band."""
    blocks = blocks if blocks.dim() == 4 else blocks[None]
    query, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    seen = blocks[:, :, query // size[0], key // size[1]]
    at = query + seqlen_k - seqlen_q
    if causal:
        seen = seen & (key <= at)
    if window[0] >= 0:
        seen = seen & (key >= at - window[0])
    if window[1] >= 0:
        seen = seen & (key <= at + window[1])
    return seen


def check_lists(rows, listed, seen, size):
    """seen: (Bm, Hm, own, other tokens). Each row lists, ascending, its partly and then
    its wholly seen blocks."""
    own, other = size
    assert rows.dtype == torch.int64
    assert listed.dtype == torch.int32
    place = 0
    for head_rows, head_seen in zip(rows.flatten(0, 1).tolist(), seen.flatten(0, 1), strict=True):
        assert len(head_rows) == -(-seen.shape[2] // own)
        for number, (begin, split, end) in enumerate(head_rows):
            assert place == begin <= split <= end
            place = end
            mine = head_seen[number * own : (number + 1) * own]
            pieces = [mine[:, j : j + other] for j in range(0, seen.shape[3], other)]
            whole = [
                j for j, piece in enumerate(pieces) if piece.shape == (own, other) and piece.all()
            ]
            partly = [j for j, piece in enumerate(pieces) if piece.any() and j not in whole]
            assert listed[begin:split].tolist() == partly
            assert listed[split:end].tolist() == whole
    assert place == listed.shape[0]


def check(mask, seen):
    check_lists(mask.query_rows, mask.query_blocks, seen, mask.block_size)
    check_lists(mask.key_rows, mask.key_blocks, seen.transpose(2, 3), mask.block_size[::-1])
    assert torch.equal(mask.dense(), seen)
    assert mask.density() == pytest.approx(seen.float().mean().item() if seen.numel() else 0.0)


@settings(max_examples=40)
@given(
    seqlen_q=st.integers(1, 150), seqlen_k=st.integers(1, 150), causal=st.booleans(),
    window=st.tuples(st.integers(-1, 60), st.integers(-1, 60)),
    size=st.sampled_from([(16, 16), (32, 16), (16, 64)]),
    heads=st.sampled_from([(1,), (3,), (2, 2), (2, 1)]), density=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_lists_hold_the_blocks_of_the_pattern_inside_the_band(
    seqlen_q, seqlen_k, causal, window, size, heads, density, seed
):
    shape = (*heads, -(-seqlen_q // size[0]), -(-seqlen_k // size[1]))
    blocks = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    mask = block_mask(
        blocks,
        block_size=size,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        causal=causal,
        window_size=window,
    )
    check(mask, rule(blocks, size, seqlen_q, seqlen_k, causal, window))


def test_a_band_is_kept_as_shifts_of_the_key_against_the_query():
    blocks = torch.ones(1, 2, 4, dtype=torch.bool)
    mask = block_mask(blocks, block_size=16, seqlen_q=32, seqlen_k=64, window_size=(5, -1))
    assert (mask.left, mask.right) == (27, None)
    mask = block_mask(
        blocks, block_size=16, seqlen_q=32, seqlen_k=64, causal=True, window_size=(-1, 9)
    )
    assert (mask.left, mask.right) == (None, 32)


def test_butterfly_joins_blocks_whose_numbers_differ_in_one_binary_digit():
    assert butterfly(4).int().tolist() == [[[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]]
    wide = butterfly(64)[0]
    assert wide.sum(1).tolist() == [7] * 64
    assert torch.equal(wide, wide.T)
    assert torch.equal(butterfly(50)[0], wide[:50, :50])


def test_local_and_global_blocks():
    assert local_global(4, 4, local=1, globals=1).int().tolist() == [
        [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    ]
    assert local_global(2, 4, local=0, globals=0).int().tolist() == [[[0, 0, 1, 0], [0, 0, 0, 1]]]


def test_random_rows_have_exactly_the_density_and_heads_differ():
    blocks = random(3, 20, 40, 0.1, seed=5)
    assert blocks.shape == (3, 20, 40)
    assert (blocks.sum(2) == 4).all()
    assert not torch.equal(blocks[0], blocks[1])
    assert torch.equal(blocks, random(3, 20, 40, 0.1, generator=torch.Generator().manual_seed(5)))
    assert (random(1, 5, 40, 0.001).sum(2) == 1).all()
    assert not random(1, 5, 40, 0.0).any()
    assert random(1, 5, 40, 1.0).all()


def test_a_quarter_of_a_million_tokens_take_memory_in_proportion_to_their_blocks():
    blocks = random(2, 2048, 2048, 0.1)
    mask = block_mask(blocks, block_size=128, seqlen_q=2**18, seqlen_k=2**18, causal=True)
    assert mask.query_blocks.shape == mask.key_blocks.shape
    assert mask.query_blocks.shape[0] == blocks.tril().sum()
    assert torch.equal(mask.blocks()[0], blocks.tril())
    assert mask.density() == pytest.approx(0.05, rel=0.02)


SQUARE = torch.ones(1, 2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"blocks": SQUARE.int()}, TypeError), ({"blocks": [[True]]}, TypeError),
        ({"blocks": SQUARE[0]}, ValueError),
        ({"blocks": SQUARE[:0]}, ValueError), ({"blocks": SQUARE[:, :1]}, ValueError),
        ({"block_size": 24}, ValueError),
        ({"block_size": (16, 8)}, ValueError), ({"block_size": (16, 16, 16)}, ValueError),
        ({"seqlen_q": -1}, ValueError), ({"window_size": (3,)}, TypeError),
        ({"window_size": (-3, 0)}, ValueError),
        ({"causal": 1}, TypeError),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_by_the_arguments_name(changes, error):
    (name,) = changes
    arguments = {"blocks": SQUARE, "block_size": 16, "seqlen_q": 32, "seqlen_k": 32, **changes}
    with pytest.raises(error, match=f"^{name}"):
        block_mask(arguments.pop("blocks"), **arguments)


@pytest.mark.parametrize(
    ("density", "error"), [(1.5, ValueError), (-0.1, ValueError), ("half", TypeError)]
)
def test_a_density_outside_zero_to_one_is_refused(density, error):
    with pytest.raises(error, match="density must be"):
        random(1, 2, 2, density)


def test_a_sliding_tile_sees_the_window_around_it_which_stays_inside_the_video():
    """Sliding tile attention, arXiv 2502.04507: the window's centre is the query's tile, clamped so
    that the window lies inside; in three dimensions."""
    tiles, window = (4, 3, 5), (3, 1, 3)
    pattern = sliding_tiles(tiles, window)[0]
    places = torch.cartesian_prod(*map(torch.arange, tiles))
    for query, place in enumerate(places.tolist()):
        low = [
            min(max(at - side // 2, 0), count - side)
            for at, side, count in zip(place, window, tiles, strict=True)
        ]
        inside = (places >= torch.tensor(low)) & (places < torch.tensor(low) + torch.tensor(window))
        assert torch.equal(pattern[query], inside.all(1))
    assert pattern.sum(1).unique().tolist() == [9]
    assert sliding_tiles((2, 3, 4), (5, 9, 7)).all()
    with pytest.raises(ValueError, match="odd"):
        sliding_tiles((4, 4, 4), (3, 2, 3))


def test_tiles_are_boxes_of_the_video_and_their_order_has_a_way_back():
    volume, tile = (4, 6, 8), (2, 3, 4)
    order = tile_order(volume, tile)
    frames, rows, columns = torch.unravel_index(order.view(-1, 24), volume)
    for axis, side in ((frames, 2), (rows, 3), (columns, 4)):
        assert ((axis.amax(1) - axis.amin(1)) == side - 1).all()
    assert torch.equal(order.argsort()[order], torch.arange(192))
    with pytest.raises(ValueError, match="divide volume"):
        tile_order((4, 6, 8), (2, 4, 4))


def test_sliding_tiles_are_attention_of_a_video_in_the_order_of_its_tiles():
    """In raster order, in float64, by the formula."""
    torch.manual_seed(0)
    volume, tile, window = (6, 8, 8), (2, 4, 4), (3, 1, 1)
    q, k, v = torch.randn(3, 1, 384, 2, 16, dtype=torch.float64)
    order = tile_order(volume, tile)
    mask = block_mask(sliding_tiles((3, 2, 2), window), block_size=32, seqlen_q=384, seqlen_k=384)
    found = flash_attn_func(q[:, order], k[:, order], v[:, order], mask=mask)[:, order.argsort()]
    box = torch.stack(torch.unravel_index(torch.arange(384), volume), 1) // torch.tensor(tile)
    # Three tiles deep, the window is all frames; of rows and columns it is the query's own tile.
    seen = (box[:, None, 1:] == box[None, :, 1:]).all(-1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("bhqk,bkhd->bqhd", weights, v))


def test_an_attention_tile_of_whole_blocks_is_a_pattern_of_blocks():
    pattern = masks.attention_tile(6, 2, 1).dense()
    blocks = block_mask(pattern, block_size=16, seqlen_q=192, seqlen_k=192)
    assert torch.equal(blocks.dense()[0, 0], masks.attention_tile(6, 32, 1).dense()[0])
