"""The small kernels around the Hopper backward, on packed sequences in Triton's interpreter: what
they make ready, and all gradients computed again as if a NaN had come out everywhere. Run by
test_portable.py in its own process.

T tokens of a side, N sequences, H query heads, K key/value heads, D head dimension.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from flashtrain_kernels import reference
from flashtrain_kernels.backends.hopper.backward_rows import finish_kernel, prepare_kernel
from flashtrain_kernels.backends.hopper.sequences import find, slots
from flashtrain_kernels.backends.portable.launch import features_of, strides_of
from flashtrain_kernels.masks import Sequences
from flashtrain_kernels.options import Options

CASES = [
    ([(70, 70), (0, 5), (65, 66)], (3, 7), (-1, 0), 64, (2, 1)),
    ([(70, 30), (9, 0), (20, 131)], (0, 70), (-1, -1), 64, (2, 2)),
    ([(66, 90)], (5, 0), (20, 4), 128, (1, 1)),
    ([(70, 70), (0, 5), (65, 66)], (3, 7), (-1, 0), 256, (2, 1)),
]


@pytest.mark.parametrize(("pairs", "tails", "window", "head_dim", "heads"), CASES)
def test_gradients_computed_again_are_the_references(pairs, tails, window, head_dim, heads):
    ends = [torch.tensor([0, *[pair[side] for pair in pairs]]).cumsum(0).int() for side in (0, 1)]
    totals, number = [int(ends[side][-1]) + tails[side] for side in (0, 1)], len(pairs)
    shapes = [
        (1, totals[0], heads[0]),
        (1, totals[1], heads[1]),
        (1, totals[1], heads[1]),
        (1, totals[0], heads[0]),
    ]
    q, k, v, dout = (torch.randn(*shape, head_dim, dtype=torch.float16) for shape in shapes)
    options = Options(head_dim**-0.5).by_boundaries(Sequences(*ends, *totals, window))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.apply(*exact, options.with_mask())
    wanted = torch.autograd.grad(out, exact, dout.double())

    out, lse = out.detach().half(), lse.detach().float().contiguous()
    # At D = 256 items have 64 keys, and dQ is stored by a kernel of its own: of what follows, the
    # last kernel does only what flags ask for.
    apart = head_dim == 256
    query_tiles = slots(totals[0], number, 64)
    key_halves = slots(totals[1], number, 64) if apart else 2 * slots(totals[1], number, 128)
    places, halves = heads[0] * query_tiles, key_halves * heads[1]
    rows, work = (
        torch.full((places * 128,), torch.nan),
        torch.full((places * 64 * head_dim,), torch.nan),
    )
    # Flags, a ticket and counters or the flags of dQ's tiles, and one beyond.
    cleared = places if apart else halves + 1
    counters = torch.full((halves + cleared + 1,), 7, dtype=torch.int32)
    prepare_kernel[(places,)](
        out, dout, lse, lse, rows, work, counters, strides_of(out), strides_of(dout), heads[0],
        totals[0], query_tiles,
        halves, ends[0], number, HAS_DLSE=False, RECOMPUTE=True, WHOLE=apart, PACKED=True,
        COUNTERS=not apart, D=head_dim, HEAD_DIM=head_dim,
    )  # fmt: skip
    assert work.isnan().all() if apart else work.eq(0).all()
    assert counters.tolist() == [7] * halves + [0] * cleared + [7]
    assert not rows.isnan().any()
    gradients = [torch.full_like(x, 55.0) for x in (q, k, v)]
    work.fill_(torch.nan)
    flags, scale_log2 = torch.ones_like(counters), options.scale * math.log2(math.e)
    tables = (ends[1], 0, 0, 0, ends[0]) * 2
    finish_kernel[(-(-(halves + places) // 128) if apart else places + halves,)](
        work, rows, flags, None, q, k, v, dout, *gradients,
        *map(strides_of, (q, k, v, dout, *gradients)),
        options.scale, scale_log2, places, heads[0], *totals, options.left or 0, options.right or 0,
        query_tiles,
        key_halves, lse, number, 0, lse, 0, *tables, RECOMPUTE=True, WHOLE=apart, PACKED=True,
        GROUP=heads[0] // heads[1], SPLIT=1, F=features_of(options), D=head_dim, HEAD_DIM=head_dim,
    )  # fmt: skip
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=5e-3, rtol=5e-3)


@triton.jit
def slots_kernel(cu_ptr, found_ptr, sequences, tokens, TILE: tl.constexpr):
    slot = tl.program_id(0)
    number, tile = find(slot, tl.arange(0, 128), cu_ptr, sequences, tokens, TILE)
    tl.store(found_ptr + 2 * slot, number)
    tl.store(found_ptr + 2 * slot + 1, tile)


ROWS = [
    ([130, 1, 64, 0, 301, 193, 128, 7], 5, 64), ([517], 0, 128), ([0, 0], 300, 128), ([0], 1, 64),
    ([128], 0, 128),
    ([1301, 0, 704], 9, 192), ([0] * 130 + [500, 130], 70, 128),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "tail", "tile"), ROWS)
def test_every_tile_has_one_slot_and_slots_go_along_the_row(lengths, tail, tile):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens, number = int(ends[-1]) + tail, len(lengths)
    count = slots(tokens, number, tile)
    found = torch.full((count, 2), -1, dtype=torch.int32)
    slots_kernel[(count,)](ends, found, number, tokens, TILE=tile)
    places = [tuple(place) for place in found.tolist()]
    assert places == sorted(set(places))
    tiles = {(n, m) for n, length in enumerate([*lengths, tail]) for m in range(-(-length // tile))}
    assert tiles <= set(places)


@pytest.mark.parametrize(
    "ends", [[0, 2000, 400], [7, 100, 400], [0, -5, 400], [0, 300, 200], [0, 400, 0, 400]]
)
def test_slots_of_boundaries_that_cannot_be_are_within_the_row(ends):
    count = slots(400, len(ends) - 1, 64)
    found = torch.full((count, 2), -1, dtype=torch.int32)
    slots_kernel[(count,)](
        torch.tensor(ends, dtype=torch.int32), found, len(ends) - 1, 400, TILE=64
    )
    assert found.ge(0).all()
    assert found[:, 0].le(len(ends) - 1).all()
