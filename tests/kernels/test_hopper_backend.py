"""Which calls the Hopper kernels get and which the portable ones keep, without a GPU."""

import importlib.util
import itertools
import logging
from dataclasses import replace

import pytest
import torch

from flashtrain_kernels import block_sparse, dispatch, environment, masks
from flashtrain_kernels.backends import Call
from flashtrain_kernels.backends.hopper import backend as hopper
from flashtrain_kernels.backends.hopper.forward_tiles import forward_tile
from flashtrain_kernels.backends.portable.tile_table import width_of
from flashtrain_kernels.options import Options

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)
SEED = torch.tensor([7, 0, 0])


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that CPU tensors lie on a GPU of this capability, with this release of Triton."""

    # What the installed release of Triton has is looked up at the first import: before
    # another one is pretended.
    if importlib.util.find_spec("triton.experimental.gluon") is not None:
        importlib.import_module("flashtrain_kernels.backends.hopper.triton_compat")

    def pretend(capability=(9, 0), release=(3, 7)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(environment, "release", lambda: release)
        hopper._unavailable.cache_clear()
        real = hopper.unavailable
        monkeypatch.setattr(hopper, "unavailable", lambda _device: real(CUDA))

    yield pretend
    hopper._unavailable.cache_clear()


@pytest.fixture
def planning_gpu(gpu, monkeypatch):
    """A GPU for whose portable kernels masks are planned in tiles of 16 for rich
    calls, and of 32 else."""
    gpu()
    monkeypatch.setattr(dispatch, "runs_kernels", lambda device: True)
    sizes = {True: (16,) * 6, False: (32,) * 6}
    monkeypatch.setattr(
        hopper.tile_table, "plan_blocks", lambda device, width, dtype, rich=False: sizes[rich]
    )


def tensors(head_dim=64, dtype=BF16, seqlen=1024, heads=2, kv_heads=2):
    q = torch.zeros(1, seqlen, heads, head_dim, dtype=dtype)
    return q, *(torch.zeros(1, seqlen, kv_heads, head_dim, dtype=dtype) for _ in range(2))


def refusals(q, k, v, **options):
    call = Call(q, k, v, Options(0.125, **options))
    return hopper.serves(call, "forward"), hopper.serves(call, "backward")


def test_tensors_on_a_cpu_have_no_hopper_kernels():
    assert refusals(*tensors()) == ("tensors are on cpu", "tensors are on cpu")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_gpu_has_none_and_is_named(capability, gpu):
    gpu(capability)
    assert f"sm_{capability[0]}{capability[1]}" in hopper.unavailable(CUDA)


@pytest.mark.parametrize("release", [(3, 5), (3, 10), (4, 0)])
def test_a_release_that_was_not_tried_is_named_once_in_a_warning_of_one_line_with_what_it_costs(
    release, gpu, caplog
):
    gpu(release=release)
    with caplog.at_level(logging.WARNING):
        reason = hopper.unavailable(CUDA)
        assert hopper.unavailable(CUDA) == reason
    assert f"installed is {release[0]}.{release[1]}" in reason
    assert "3.6 to 3.9" in reason
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.6 to 0.75 times the speed" in record.getMessage()
    assert "\n" not in record.getMessage()


BANDS = [{}, {"right": 0}, {"left": -100, "right": 0}]
SLOPES, DROPS = {"alibi_slopes": torch.ones(2)}, {"dropout_p": 0.1, "seed": SEED}
BIAS = {"bias": torch.zeros(1, 1, 1, 1)}
DOCUMENTS = {"mask": masks.document(torch.arange(1024)[None] // 300, causal=True)}
TWO_INTERVALS = {"mask": masks.global_window(1024, 5, (100, 0))}
EVERYTHING = torch.ones(1, 8, 8, dtype=torch.bool)
IN_BLOCKS = {
    "mask": block_sparse.block_mask(EVERYTHING, block_size=128, seqlen_q=1024, seqlen_k=1024)
}
# A plan's tiles by width where planning_gpu has no other: forward, dQ, dK and dV.
TILES = {
    64: (64, 64, 32, 32, 64, 128), 128: (128, 128, 32, 32, 64, 128),
    256: (128, 64, 128, 64, 64, 64),
}  # fmt: skip
SERVED = [
    ({"head_dim": head_dim, "kv_heads": kv_heads}, {**band, **rich})
    for head_dim, kv_heads, band in itertools.product((64, 128), (1, 2), BANDS)
    for rich in ({}, SLOPES, {"alibi_slopes": torch.ones(1, 2)}, DROPS)
]
SERVED += [
    ({"head_dim": head_dim}, {**band, "softcap": 30.0})
    for head_dim in (64, 72, 128, 256)
    for band in BANDS
]
SERVED += [({"head_dim": head_dim}, {}) for head_dim in (72, 120, 200, 248, 256)]
SERVED += [({"seqlen": 512}, {"right": 0, **DROPS}), ({}, {"right": 5, **SLOPES})]
LEFT = [  # to the portable kernels, and a word of the reason
    ({"head_dim": 68}, {}, "head dimension"), ({"head_dim": 63}, {}, "head dimension"),
    ({"dtype": torch.float32}, {}, "float32"), ({}, BIAS, ""), ({}, {**BIAS, "softcap": 3.0}, ""),
    ({}, {**BIAS, **DROPS}, ""), ({}, {**BIAS, **SLOPES}, ""), ({}, {**DROPS, "softcap": 3.0}, ""),
    ({}, {**SLOPES, "softcap": 3.0}, ""), ({}, {**SLOPES, **DROPS}, "dropout"),
    ({}, {**SLOPES, **DOCUMENTS}, "masks"),
    ({}, {"alibi_slopes": torch.ones(4)[::2]}, "stride"),
    ({"head_dim": 256}, SLOPES, "head dimensions"),
    ({"head_dim": 256}, DROPS, "head dimensions 64 and 128"), ({}, {**DROPS, **DOCUMENTS}, "masks"),
    ({}, {"softcap": 1e-5}, "softcap"),
]  # fmt: skip


@pytest.mark.parametrize("release", [(3, 6), (3, 7), (3, 8), (3, 9)])
def test_what_is_served_in_both_passes(release, gpu):
    gpu(release=release)
    for given, options in SERVED:
        assert refusals(*tensors(**given), **options) == (None, None), (given, options)
    # Read where it lies.
    assert refusals(*torch.zeros(2, 100, 3, 4, 64, dtype=BF16).unbind(2)) == (None, None)


@pytest.mark.parametrize(("given", "options", "word"), LEFT)
def test_what_is_left_to_the_portable_kernels_is_named(given, options, word, gpu):
    gpu()
    assert all(
        reason is not None and word in reason for reason in refusals(*tensors(**given), **options)
    )


def test_what_lies_otherwise_than_they_read_is_left_to_the_portable_kernels(gpu):
    gpu()
    q, k, v = tensors()
    odd = torch.zeros(1, 1024, 2, 68, dtype=BF16)[..., :64]
    assert all("q" in reason and "stride" in reason for reason in refusals(odd, k, v))
    assert refusals(q[:, :1001], k, v, **SLOPES) == (None, None)
    assert refusals(q[:, :1008], k, v, **DROPS) == (None, None)  # Sk - Sq = 16
    assert all("multiple of 16" in reason for reason in refusals(q[:, :1016], k, v, **DROPS))
    forward, backward = refusals(*tensors(40))
    assert (forward, "head dimension 40" in backward) == (None, True)


@pytest.mark.parametrize("requested", [True, False])
def test_a_deterministic_backward_is_served_but_with_masks(requested, gpu):
    """Requested of the call, or of torch."""
    from flashtrain_kernels.backends.hopper.backward import choices

    gpu()
    torch.use_deterministic_algorithms(not requested)
    try:
        for given, options in SERVED:
            options, inputs = {**options, "deterministic": requested}, tensors(**given)
            assert refusals(*inputs, **options) == (None, None)
            # Beyond D = 128 dQ is not added up: a kernel of its own has all keys
            # (backward_dq_d256.py).
            ordered = choices(Call(*inputs, Options(0.125, **options)), inputs).deterministic
            assert ordered == (given.get("head_dim", 64) <= 128)
        planned = DOCUMENTS["mask"].planned(64, BF16)
        assert "deterministic" in refusals(*tensors(), deterministic=requested, mask=planned)[1]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not choices(Call(*tensors(), Options(0.125)), tensors()).deterministic


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 200, 256])
def test_packed_sequences_are_served_in_both_passes_wherever_no_mask_is_made_of_them(
    head_dim, window, gpu
):
    gpu()
    cu = torch.zeros(4, dtype=torch.int32)
    q, k, v = tensors(head_dim=head_dim)
    assert hopper.finds_sequences(CUDA, head_dim, q.dtype, False)
    sequences = masks.Sequences(cu, cu, 1024, 1024, window)
    for rich in ({}, SLOPES) if head_dim in (64, 128) else ({}, {"softcap": 3.0}):
        options = Options(0.125, **rich).by_boundaries(sequences)
        assert [hopper.serves(Call(q, k, v, options), way) for way in ("forward", "backward")] == [
            None,
            None,
        ]
        assert hopper.changes_sequences(options, head_dim) == ("alibi_slopes" in rich)
    rows = [x.expand(2, -1, -1, -1) for x in (q, k, v)]
    assert "more than one row" in hopper.serves(Call(*rows, options), "forward")
    for others in (
        (40, BF16, False),
        (264, BF16, False),
        (64, torch.float32, False),
        (64, BF16, True),
    ):
        assert not hopper.finds_sequences(CUDA, *others)


def test_documents_and_block_masks_are_served_and_planned_for_their_tiles(gpu):
    gpu()
    for options in (DOCUMENTS, IN_BLOCKS):
        assert refusals(*tensors(), **options) == (None, None)
    sizes = hopper.plan_blocks(DOCUMENTS["mask"], 64, BF16, rich=False, softcap=False)
    assert sizes[:2] == (64, 64)  # queries and keys a tile of the forward
    assert sizes[4:] == (64, 128)  # and of the backward


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_masks_with_positions_of_keys_are_served_and_planned_as_others_are(head_dim, planning_gpu):
    order = torch.arange(1024).flip(0)
    one_and_two = masks.causal(1024), masks.global_window(1024, 5, (100, 0))
    for whole in one_and_two if head_dim <= 128 else one_and_two[:1]:
        mask = whole.select(order, order)
        assert mask.keys is not None
        for softcap in (0.0, 3.0):
            planned = mask.planned(head_dim, BF16, softcap=softcap > 0)
            call = Call(
                *tensors(head_dim, kv_heads=1), Options(0.125, mask=planned, softcap=softcap)
            )
            tile = forward_tile(call.q, call.k, call.options)
            assert planned.plan.blocks[:2] == (tile.consumers * tile.rows, tile.block_k)
            assert planned.plan.blocks[2:] == TILES[width_of(head_dim)][2:]
            assert [hopper.serves(call, way) for way in ("forward", "backward")] == [None, None]
            assert hopper._readied(call).options.mask.plan is planned.plan
        # What changes scores or weights otherwise is refused with any mask, in both passes.
        assert mask.planned(head_dim, BF16, rich=True).plan.blocks == (16,) * 6
        for change in ({"dropout_p": 0.1, "seed": SEED}, {"alibi_slopes": torch.ones(2)}):
            forward, backward = refusals(*tensors(head_dim), mask=mask, **change)
            assert forward == backward
            assert forward is not None


def test_the_forward_reads_positions_of_keys_and_calls_without_them_have_no_argument_more():
    from flashtrain_kernels.backends.hopper.forward import mask_arguments

    unused, order = torch.zeros(1), torch.arange(256).flip(0)
    whole = masks.causal(256).planned_for((64,) * 6)
    mask = whole.select(order, order).planned_for((64,) * 6)
    given, plain = (mask_arguments(each, unused) for each in (mask, whole))
    assert given[2] is mask.keys
    assert plain[2] is unused
    assert len(given) == len(plain)
    assert given[6] == 0  # the stride of a mask that all rows share: so do its keys


@pytest.mark.parametrize("head_dim", [136, 200, 256])
def test_masks_of_wide_heads_are_served_with_one_interval_a_query(head_dim, gpu):
    gpu()
    for deterministic in (False, True):
        assert refusals(*tensors(head_dim), **DOCUMENTS, deterministic=deterministic) == (
            None,
            None,
        )
    with dispatch.force("hopper"):
        for mask, word in ((IN_BLOCKS, "block masks"), (TWO_INTERVALS, "two intervals")):
            assert all(word in reason for reason in refusals(*tensors(head_dim), **mask))
            assert refusals(*tensors(128), **mask)[0] is None


def test_masks_that_the_portable_kernels_serve_are_planned_for_their_tiles(planning_gpu):
    for softcap, tile in ((False, 32), (True, 16)):
        planned = TWO_INTERVALS["mask"].planned(256, BF16, softcap=softcap)
        assert planned.plan.blocks == (tile,) * 6


def test_dropout_of_packed_sequences_is_served_with_one_cu_seqlens(gpu):
    gpu()
    q, k, v = tensors()
    one, other = (
        torch.tensor([0, 100, 1024], dtype=torch.int32),
        torch.tensor([0, 200, 1024], dtype=torch.int32),
    )
    options = Options(0.125, dropout_p=0.1, seed=SEED)
    for ends, served in ((one, True), (other, False)):
        sequences = masks.Sequences(one, ends, 1024, 1024, (-1, 0))
        for mask in (sequences, sequences.mask()):
            assert hopper.changes_sequences(replace(options, mask=mask), 64) == served
            assert not hopper.changes_sequences(replace(options, mask=mask, softcap=2.0), 64)
            assert not hopper.changes_sequences(replace(options, mask=mask, dropout_p=0.0), 64)
        call = Call(q, k, v, options.by_boundaries(sequences))
        reasons = tuple(hopper.serves(call, way) for way in ("forward", "backward"))
        assert (
            (reasons == (None, None))
            if served
            else all("other cu_seqlens" in reason for reason in reasons)
        )


def test_masks_with_a_softcap_are_planned_for_the_tiles_of_those_that_serve_them(planning_gpu):
    mask = DOCUMENTS["mask"]
    for head_dim in (64, 96, 128, 200, 256):
        blocks = TILES[width_of(head_dim)]
        planned = mask.planned(head_dim, BF16, softcap=True)
        assert planned.plan.blocks == mask.planned(head_dim, BF16).plan.blocks == blocks
        assert refusals(*tensors(head_dim), mask=planned, softcap=3.0) == (None, None)
        call = Call(*tensors(head_dim), Options(0.125, mask=planned, softcap=3.0))
        assert hopper._readied(call).options.mask.plan is planned.plan
    assert mask.planned(64, BF16, rich=True, softcap=True).plan.blocks == (16,) * 6


def test_short_causal_backwards_go_to_the_portable_kernels(gpu):
    gpu()
    short = tensors(seqlen=512)
    assert refusals(*short, right=0) == (None, "the portable kernels are faster")
    assert refusals(*short) == (None, None)
    with dispatch.force("hopper"):
        assert refusals(*short, right=0) == (None, None)


def test_short_calls_with_a_head_for_every_program_add_dq_up_in_one_order_and_are_served(gpu):
    gpu()
    many = tensors(seqlen=128, heads=132, kv_heads=132)
    for options in ({}, {"right": 0}, {"right": 5}):
        assert refusals(*many, **options) == (None, None)
        assert refusals(*many, **options, deterministic=True) == (None, None)
    # Queries that do not see the first keys; wide heads; a last round that is half empty; grouped
    # heads; many queries: their programs have an item each, and take turns.
    from flashtrain_kernels.backends.hopper.backward import choices

    for given, options, deterministic in (
        (many, {"right": 0}, False),
        (many, {"right": -1}, True),
        (many, {"left": -64, "right": 0}, True),
        (tensors(128, seqlen=128, heads=132, kv_heads=132), {"right": 0}, True),
        (tensors(seqlen=128, heads=198, kv_heads=198), {"right": 0}, True),
        (tensors(seqlen=128, heads=132, kv_heads=66), {"right": 0}, True),
        ((tensors(seqlen=8192, heads=132)[0], *many[1:]), {"right": 0}, True),
    ):
        chosen = choices(Call(*given, Options(0.125, deterministic=True, **options)), given)
        assert (chosen.whole, chosen.deterministic) == (not deterministic, deterministic)


def test_programs_of_the_backward_stay_where_items_are_short_or_equally_long():
    from flashtrain_kernels.backends import Gradients
    from flashtrain_kernels.backends.hopper.backward import backward_launches

    def programs(head_dim, seqlen, options):
        q = torch.empty(1, seqlen, 32, head_dim, dtype=BF16, device="meta")
        lse = torch.empty(1, 32, seqlen, device="meta")
        launch = backward_launches(
            Call(q, q, q, options), Gradients(q, None, q, lse, q, q, q, None)
        )[1]
        return launch.grid[0], launch.constants["C"].counted

    causal = Options(0.125, right=0)
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    packed = Options(0.125).by_boundaries(masks.Sequences(ends, ends, 4096, 4096, (-1, 0)))
    staying = programs(64, 4096, Options(0.125))[0]
    assert staying < 32 * 4096 // 128
    assert programs(64, 1024, causal) == (staying, True)
    assert programs(64, 4096, packed) == (staying, True)
    documents = Options(0.125, mask=masks.causal(4096).planned_for((64, 64, 32, 32, 64, 128)))
    for options in (causal, replace(packed, softcap=20.0), documents):
        number, counted = programs(64, 4096, options)
        assert (number > staying, counted) == (True, False)
    assert programs(128, 1024, causal) == (32 * 8, False)


def test_forcing_the_portable_kernels_is_a_reason(gpu):
    gpu()
    with dispatch.force("portable"):
        assert hopper.unavailable(CUDA) == "portable is forced"


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize(
    ("left", "right"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_no_item_of_the_backward_visits_a_tile_that_is_not_there(keys, left, right):
    from plain_jit import plain

    from flashtrain_kernels.backends.hopper import backward_schedule
    from flashtrain_kernels.backends.portable.tiles import Bounds

    band_tiles = plain(backward_schedule.band_tiles)
    for seqlen_q, seqlen_k in itertools.product(
        (1, 10, 64, 65, 130, 300), (1, 10, 20, 64, 65, 130, 300)
    ):
        tiles = -(-seqlen_q // 64)
        bounds = Bounds(seqlen_q, seqlen_k, seqlen_k - seqlen_q - 20, seqlen_k - seqlen_q)
        for item in range(-(-seqlen_k // keys)):
            reach = band_tiles(item * keys, bounds, left, right, keys, False)
            visited = range(reach.first, reach.past)
            assert not visited or 0 <= visited[0] <= visited[-1] < tiles


@pytest.mark.parametrize("dims", [(192, 128), (96, 64), (256, 200)])
def test_narrower_values_are_served_but_those_of_odd_or_small_widths(dims, gpu):
    gpu()
    q, k, _ = tensors(dims[0])
    assert refusals(q, k, tensors(dims[1])[2], right=0) == (None, None)
    for width in (dims[1] - 4, 40):
        assert all("values" in reason for reason in refusals(q, k, tensors(width)[2]))


def test_heads_beyond_256_are_left_to_the_portable_kernels(gpu):
    gpu()
    assert all("256" in reason for reason in refusals(*tensors(512), right=0))
