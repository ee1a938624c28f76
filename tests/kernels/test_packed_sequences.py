"""Packed sequences in the Hopper kernels, without a GPU: the very arithmetic that finds their
tiles visits every visible pair once, hides every other, and stores each row once and nowhere
else. And which calls get them.

T tokens of a side, N sequences.
"""

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import each_alone, sequence_pairs

import flashtrain_kernels as fk
from flashtrain_kernels import attend as way_in
from flashtrain_kernels import dispatch, ops
from flashtrain_kernels.arguments import sizes_of
from flashtrain_kernels.attend import Requested
from flashtrain_kernels.eager import attention
from flashtrain_kernels.forms import BATCH, ROW
from flashtrain_kernels.masks import Mask, Sequences
from flashtrain_kernels.options import Options, pack, unpack
from flashtrain_kernels.packing import Packing

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

WINDOWS = [(-1, -1), (-1, 0), (70, 0), (-1, 30), (40, 20), (0, 0), (90, -1)]
LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 260), st.sampled_from([0, 64, 128, 192, 384]))


@st.composite
def packings(draw):
    """(cu_q, cu_k, Tq, Tk, window)."""
    pairs = draw(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=6))
    if draw(st.booleans()):
        pairs = [(a, a) for a, _ in pairs]
    cu_q, cu_k = (np.cumsum([0, *[pair[side] for pair in pairs]]) for side in (0, 1))
    tails = draw(st.tuples(st.sampled_from([0, 0, 1, 63, 130]), st.sampled_from([0, 0, 1, 200])))
    return (
        cu_q,
        cu_k,
        int(cu_q[-1]) + tails[0],
        int(cu_k[-1]) + tails[1],
        draw(st.sampled_from(WINDOWS)),
    )


def visible(cu_q, cu_k, total_q, total_k, window):
    """(Tq, Tk) bool, by the definition."""
    seen = np.zeros((total_q, total_k), bool)
    seen[: cu_q[-1], : cu_k[-1]] = sequence_pairs(
        list(zip(np.diff(cu_q), np.diff(cu_k), strict=True)), *window
    )
    return seen


def features(window):
    from flashtrain_kernels.backends.portable.launch import Features

    return Features(left=window[0] >= 0, right=window[1] >= 0)


def bounds(total_q, total_k, window):
    from flashtrain_kernels.backends.portable.tiles import Bounds

    return Bounds(total_q, total_k, -max(window[0], 0), max(window[1], 0))


def seen_in_tile(row, column, hidden, own, f):
    """What a tile of queries counts of a tile of keys: forward_masks.hide."""
    seen = np.broadcast_to(row < own.seqlen_q, np.broadcast_shapes(row.shape, column.shape))
    if hidden:
        past = np.minimum(row + own.right + 1, own.seqlen_k) if f.right else own.seqlen_k
        seen = seen & (column < past)
        if f.left:
            seen = seen & (column >= row + own.left)
    return seen


@settings(max_examples=150)
@given(packing=packings(), tile=st.sampled_from([(64, 64), (128, 128), (192, 128)]))
def test_the_forwards_tiles_visit_each_visible_pair_once_and_store_each_row_once(packing, tile):
    from plain_jit import Pointer, lanes, plain

    from flashtrain_kernels.backends.hopper import sequences
    from flashtrain_kernels.backends.portable import traversal

    cu_q, cu_k, total_q, total_k, window = packing
    wanted, f, whole = visible(*packing), features(window), bounds(total_q, total_k, window)
    count, stored = np.zeros(wanted.shape, int), np.zeros(total_q, int)
    find, sequence_of = plain(sequences.find), plain(sequences.sequence_of)
    key_pieces, position = plain(traversal.key_pieces), plain(traversal.position_of_step)
    of_q, of_k, number = Pointer(cu_q), Pointer(cu_k), len(cu_q) - 1
    rows, width = tile
    for slot in range(sequences.slots(total_q, number, rows)):
        sequence, place = find(slot, lanes(128), of_q, number, total_q, rows)
        query, key, own = sequence_of(sequence, of_q, of_k, number, whole, False)
        first = place * rows
        assert first >= 0
        real = max(0, min(rows, own.seqlen_q - first))
        stored[query + first : query + first + real] += 1
        pieces = key_pieces(first, own, None, 0, f, rows, width)
        for step in range(pieces.masked + pieces.full if first < own.seqlen_q else 0):
            hidden = step < pieces.masked
            inside = step if hidden else step - pieces.masked
            at = position(inside, 0, pieces, None, hidden, False, f, 1, width, width)
            row, column = first + np.arange(rows)[:, None], at + np.arange(width)[None, :]
            r, c = np.nonzero(seen_in_tile(row, column, hidden, own, f))
            np.add.at(count, (query + first + r, key + at + c), 1)
    assert np.array_equal(count, wanted.astype(int))
    assert np.array_equal(stored, np.ones(total_q, int))


@settings(max_examples=150)
@given(packing=packings(), keys=st.sampled_from([64, 128]), counted=st.booleans())
def test_the_backwards_items_visit_each_visible_pair_once_and_store_each_key_once(
    packing, keys, counted
):
    from plain_jit import Pointer, lanes, packed_call, plain

    from flashtrain_kernels.backends.hopper import (
        backward_kernel,
        backward_parts,
        backward_schedule,
        sequences,
    )

    cu_q, cu_k, total_q, total_k, window = packing
    wanted = visible(*packing)
    number = len(cu_q) - 1
    choices = backward_kernel.Choices(
        stages=3,
        left=window[0] >= 0,
        right=window[1] >= 0,
        packed=True,
        keys=keys,
        counted=counted,
    )
    call, replaced = packed_call(cu_q, cu_k, total_q, total_k, window, keys=keys)
    tiles, items = call.query_tiles, call.key_tiles
    find, begin_of = plain(sequences.find), plain(sequences.begin_of)
    found = {}
    work_of = plain(
        backward_schedule.work_of, **replaced, load_number=lambda notes, place: found[place]
    )
    sequence_of_item = plain(backward_schedule.sequence_of_item, **replaced)
    hide = plain(backward_parts.hide, opaque=lambda x: x)
    tile_of, first_step = plain(backward_schedule.tile_of), plain(backward_schedule.first_step)
    # The rows that the first kernel gives each slot of queries, and the last one stores dQ for.
    of_tile = []
    for slot in range(tiles):
        sequence, place = find(slot, lanes(128), Pointer(cu_q), number, total_q, 64)
        first = begin_of(sequence, Pointer(cu_q), number, total_q) + place * 64
        end = begin_of(sequence + 1, Pointer(cu_q), number, total_q)
        of_tile.append((first, max(0, min(64, end - first))))
    assert np.array_equal(
        np.sort(np.concatenate([np.arange(first, first + real) for first, real in of_tile])),
        np.arange(total_q),
    )
    count, stored = np.zeros(wanted.shape, int), np.zeros(total_k, int)
    for item in range(items):
        found.update(
            enumerate(sequence_of_item(item, call, number, choices), backward_schedule.FOUND.value)
        )
        walk, _masks, first_key, head_place = work_of(item, call, None, choices)
        assert (head_place, walk.item_tile) == (0, item)
        real = max(0, min(keys, walk.bounds.seqlen_k - first_key))
        stored[walk.keys_at + first_key : walk.keys_at + first_key + real] += 1
        steps, member, _ = first_step(walk, choices)
        assert steps == 0 or real > 0
        for i in range(steps):
            tile, masked = tile_of(i, member, walk, choices)
            # Else what is loaded and what the workspaces hold were apart.
            first, queries = of_tile[tile]
            assert walk.queries_at + tile * 64 == first
            key = first_key + np.arange(keys)[:, None]
            s = np.zeros((keys, 64))
            if masked:
                s = hide(s, tile, key, key, walk.bounds, None, choices, None)
            # Others' log-sum-exp is +inf.
            k, q = np.nonzero((s == 0) & (np.arange(64) < queries)[None, :])
            np.add.at(count, (first + q, walk.keys_at + first_key + k), 1)
    assert np.array_equal(count, wanted.astype(int))
    assert np.array_equal(stored, np.ones(total_k, int))


@settings(max_examples=150)
@given(packing=packings())
def test_the_programs_of_dq_at_d_256_visit_each_visible_pair_once_and_store_each_row_once(packing):
    from plain_jit import Pointer, plain

    from flashtrain_kernels.backends.hopper import backward_dq_d256 as of_dq
    from flashtrain_kernels.backends.hopper import backward_kernel, forward_masks, sequences

    cu_q, cu_k, total_q, total_k, window = packing
    wanted, f, number = visible(*packing), features(window), len(cu_q) - 1
    tiles, row_tiles = (sequences.slots(total_q, number, rows) for rows in (128, 64))
    mask = forward_masks.MaskTables(Pointer(cu_k), 0, 0, 0, 0, number)
    choices = backward_kernel.Choices(stages=2, packed=True)
    call = of_dq.Call(1.0, 1, tiles, row_tiles, 1, 1, None, None, None, None)
    work, pieces_of, place = map(plain, (of_dq._work, of_dq._pieces, forward_masks.place))
    count, stored = np.zeros(wanted.shape, int), np.zeros(total_q, int)
    for program in range(tiles):
        whole = bounds(total_q, total_k, window)
        item = work(program, call, whole, mask, Pointer(cu_q), choices)
        real = max(0, min(128, item.bounds.seqlen_q - item.first))
        stored[item.queries_at + item.first : item.queries_at + item.first + real] += 1
        assert real == 0 or item.tile + (item.first + real - 1) // 64 < row_tiles
        pieces, steps = pieces_of(item, mask, f)
        assert steps == 0 or real > 0
        for step in range(steps):
            at = place(step, pieces, None, f, 1, 64)
            row, column = item.first + np.arange(128)[:, None], at + np.arange(64)[None, :]
            r, c = np.nonzero(seen_in_tile(row, column, step < pieces.masked, item.bounds, f))
            np.add.at(count, (item.queries_at + item.first + r, item.keys_at + at + c), 1)
    assert np.array_equal(count, wanted.astype(int))
    assert np.array_equal(stored, np.ones(total_q, int))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=900),
    tile=st.sampled_from([64, 128, 192]),
)
def test_thousands_of_sequences_are_found(lengths, tile):
    from plain_jit import Pointer, lanes, plain

    from flashtrain_kernels.backends.hopper import sequences

    cu = np.cumsum([0, *(lengths * (1 + 40 * (len(lengths) > 500)))])
    number, total = len(cu) - 1, int(cu[-1]) + 5
    find = plain(sequences.find)
    begins = np.array([*(cu[:-1] // tile + np.arange(number)), cu[-1] // tile + number])
    slots = sequences.slots(total, number, tile)
    for slot in {*range(0, slots, max(1, slots // 40)), slots - 1}:
        sequence = int(np.searchsorted(begins, slot, side="right")) - 1
        assert find(slot, lanes(128), Pointer(cu), number, total, tile) == (
            sequence,
            slot - begins[sequence],
        )


@settings(max_examples=100)
@given(
    given_q=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=6),
    small=st.booleans(), total=st.integers(1, 300),
)  # fmt: skip
def test_nothing_that_cu_seqlens_holds_makes_a_kernel_write_elsewhere(given_q, small, total):
    from plain_jit import Pointer, lanes, plain

    from flashtrain_kernels.backends.hopper import sequences

    cu = np.array([value % 400 for value in given_q] if small else given_q)
    find, sequence_of = plain(sequences.find), plain(sequences.sequence_of)
    for slot in range(sequences.slots(total, len(cu) - 1, 64)):
        number, place = find(slot, lanes(128), Pointer(cu), len(cu) - 1, total, 64)
        query, key, own = sequence_of(
            number, Pointer(cu), Pointer(cu), len(cu) - 1, bounds(total, total, (-1, 0)), False
        )
        assert 0 <= number < len(cu)
        assert place >= 0
        assert query >= 0
        assert key >= 0
        assert query + own.seqlen_q <= total
        assert key + own.seqlen_k <= total


# Which calls go by boundaries, and that all around the kernels understands them: by the
# reference, on a CPU.


def calls(**options):
    """Outputs and gradients of the three packed forms, for sequences of which one has no
    queries and one no keys."""
    made = torch.Generator().manual_seed(3)
    qkv = torch.randn(13, 3, 4, 6, generator=made, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(15, 2, 2, 6, generator=made, dtype=torch.float64, requires_grad=True)
    cu_q, cu_k = (
        torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 3, 7, 12], [0, 5, 9, 9, 13])
    )
    q = qkv[:, 0]
    for out, lse in (
        fk.flash_attn_varlen_func(q, *kv.unbind(1), cu_q, cu_k, 9, 9, return_lse=True, **options),
        fk.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 9, 9, return_lse=True, **options),
        fk.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 9, return_lse=True, **options),
    ):
        loss = (out * torch.arange(6)).sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
        yield from (out, lse, *torch.autograd.grad(loss, (qkv, kv), allow_unused=True))


@pytest.fixture
def by_boundaries(monkeypatch):
    """Pretend that the kernels find sequences, and count the masks made of them."""
    made = []
    of_mask = Sequences.mask
    monkeypatch.setattr(dispatch, "finds_sequences", lambda *_: True)
    monkeypatch.setattr(Sequences, "mask", lambda self: made.append(1) or of_mask(self))
    with dispatch.force("reference"):
        yield made


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (-1, 0)}], ids=str
)
def test_a_call_by_boundaries_gives_what_its_mask_gives(options, monkeypatch):
    with dispatch.force("reference"):
        wanted = list(calls(**options))
        monkeypatch.setattr(dispatch, "finds_sequences", lambda *_: True)
        got = list(calls(**options))
    assert len(got) == len(wanted) == 12
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def sizes_and_packing():
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    q = torch.zeros(8, 2, 16)
    packing = Packing(cu, cu, 4, 4)
    return sizes_of(ROW, (q, q), packing.number), packing, cu


def test_no_mask_is_made_before_the_kernels_run(by_boundaries):
    sizes, packing, cu = sizes_and_packing()
    options = way_in.options_of(sizes, Requested(causal=True), packing)
    assert options.mask == Sequences(cu, cu, 8, 8, (-1, 0))
    assert by_boundaries == []
    again = unpack(pack(options))
    assert (again.mask, again.left, again.right) == (options.mask, None, 0)


def test_a_mask_of_packed_sequences_is_left_for_its_boundaries_and_its_parts_are_not(by_boundaries):
    sizes, packing, cu = sizes_and_packing()
    mask = fk.masks.varlen(cu, cu, 8, 8, window=(2, 1)).planned(64, torch.bfloat16)
    options = way_in.options_of(sizes, Requested(mask=mask), packing)
    assert options.mask == Sequences(cu, cu, 8, 8, (2, 1))
    assert (options.left, options.right) == (-2, 1)
    part = mask.select(torch.arange(8).flip(0), torch.arange(8))
    assert part.sequences is None
    assert isinstance(way_in.options_of(sizes, Requested(mask=part), packing).mask, Mask)
    two_rows = way_in.options_of(sizes._replace(batch=2), Requested(mask=mask))
    assert isinstance(two_rows.mask, Mask)


def test_operators_take_sequences_as_torch_library_wants(by_boundaries):
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    options = Options(0.25).by_boundaries(Sequences(cu, cu, 8, 8, (-1, 0)))
    torch.library.opcheck(ops.FORWARD, (q, k, v, *pack(options)))


def test_vmap_and_grad_take_them_one_by_one(by_boundaries):
    cu = torch.tensor([[0, 3, 7], [0, 5, 8]], dtype=torch.int32)
    q = torch.randn(2, 8, 2, 16, dtype=torch.float64)

    def loss(q, cu):
        options = Options(0.25).by_boundaries(Sequences(cu, cu, 8, 8, (-1, 0)))
        return (
            attention(ops.FORWARD_IN[BATCH], (q[None], q[None], q[None]), options)[0].square().sum()
        )

    wanted = torch.stack([torch.func.grad(loss)(q[i], cu[i]) for i in range(2)])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(q, cu), wanted)


@pytest.fixture
def checked(monkeypatch, by_boundaries):
    """The calls that were checked."""
    calls = []
    options_of = way_in.options_of
    monkeypatch.setattr(way_in, "options_of", lambda *a: (calls.append(a), options_of(*a))[1])
    way_in.CHECKED.clear()
    return calls


@pytest.mark.parametrize("parts", [1, 2, 3], ids=["qkv", "q, kv", "q, k, v"])
def test_a_packed_call_like_one_before_is_checked_by_its_boundaries_alone(parts, checked):
    shapes = {1: [(20, 3, 2, 16)], 2: [(20, 2, 16), (20, 2, 2, 16)], 3: [(20, 2, 16)] * 3}[parts]
    function = {
        1: lambda x, ends, longest: fk.flash_attn_varlen_qkvpacked_func(
            x, ends, longest, causal=True
        ),
        2: lambda q, kv, *ends: fk.flash_attn_varlen_kvpacked_func(
            q, kv, *both(*ends), causal=True
        ),
        3: lambda q, k, v, *ends: fk.flash_attn_varlen_func(q, k, v, *both(*ends), causal=True),
    }[parts]

    def both(ends, longest):
        return ends, ends, longest, longest

    for turn, ends in enumerate(([0, 7, 20], [0, 12, 19], [0, 20, 20])):
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        out = function(*given, torch.tensor(ends, dtype=torch.int32), 20)
        apart = [x for y in given for x in (y.unbind(1) if y.dim() == 4 else [y])]
        alone, _ = each_alone(fk.reference.attention, *apart, ends, ends, causal=True)
        torch.testing.assert_close(out[: ends[-1]], alone)
        assert out[ends[-1] :].eq(0).all()
        got, wanted = (torch.autograd.grad(x.square().sum(), given) for x in (out, alone))
        torch.testing.assert_close(got, wanted)
        assert len(checked) == 1, turn
    name = "" if parts == 1 else "_q"
    for ends, longest, mistake in (
        ([0, 7, 21], 20, f"cu_seqlens{name} must .* the number of tokens, 20"),
        ([0, 12, 7], 20, f"cu_seqlens{name} must not decrease"),
        ([1, 7, 20], 20, f"cu_seqlens{name} must start at 0"),
        ([0, 7, 20], 12, f"max_seqlen{name} must .* longest sequence's 13"),
    ):
        with pytest.raises(ValueError, match=mistake):
            function(*given, torch.tensor(ends, dtype=torch.int32), longest)
    with pytest.raises(TypeError, match=f"max_seqlen{name} must"):
        function(*given, torch.tensor([0, 7, 20], dtype=torch.int32), 20.0)
    assert len(checked) == 1
    function(*given, torch.tensor([0, 7, 15, 20], dtype=torch.int32), 20)
    assert len(checked) == 2  # another number of sequences


@pytest.mark.parametrize("packed", [True, False])
def test_a_call_with_a_mask_of_boundaries_like_one_before_is_not_checked_again(packed, checked):
    def attend(ends, window, seqlen=20, **changed):
        cu = torch.tensor(ends, dtype=torch.int32)
        mask = fk.masks.varlen(cu, cu, seqlen, seqlen, causal=True, window=window)._replace(
            **changed
        )
        x = [torch.randn(seqlen, 2, 16) for _ in range(3)]
        if packed:
            out = fk.flash_attn_varlen_func(
                *x, cu, cu, seqlen, seqlen, 0.3, mask=mask, dropout_seed=3
            )
        else:
            out = fk.flash_attn_func(*(y[None] for y in x), 0.3, mask=mask, dropout_seed=3)[0]
        options = {"causal": True, "window_size": window, "dropout_p": 0.3, "dropout_seed": 3}
        torch.testing.assert_close(
            out, fk.flash_attn_varlen_func(*x, cu, cu, seqlen, seqlen, **options)
        )

    for ends in ([0, 7, 20], [0, 12, 20]):
        attend(ends, (-1, -1))
        assert len(checked) == 2  # the one with the mask, and the one without
    attend([0, 12, 20], (5, -1))
    assert len(checked) == 4
    attend([0, 12, 24], (5, -1), 24)
    assert len(checked) == 6
    with pytest.raises((TypeError, ValueError), match="mask"):
        attend([0, 12, 20], (5, -1), queries=[1])
    with pytest.raises((TypeError, ValueError), match="mask"):
        attend([0, 12, 20], (5, -1), queries=torch.zeros(5, 1, 21, dtype=torch.int32))
    with pytest.raises((TypeError, ValueError), match="mask"):
        attend([0, 12, 20], (5, -1), seqlen_k=21)
