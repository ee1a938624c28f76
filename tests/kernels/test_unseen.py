"""What nobody sees may hold anything, on CPU tensors too: NaN and inf there change no output and no
gradient, and get the gradient 0. What some see stays with those who see it. (On GPUs:
test_gpu_memory.py; in the interpreter: interpreter_cases.py.)"""

from functools import partial

import pytest
import torch
from attention_cases import MASKS, Case, run

import flashtrain_kernels as fk
from flashtrain_kernels import reference

B, H, K, D = 2, 4, 2, 8
BAD = [torch.nan, torch.inf, -torch.inf]
EXTRA = {
    "plain": {},
    "alibi": {"alibi_slopes": torch.ones(H)},
    "lse": {"return_lse": True},
    "softcap": {"softcap": 4.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 1},
    "sink": {"learnable_sink": torch.zeros(H)},
}


def blocks(seqlen_q, seqlen_k):
    """The second block of queries sees nothing, and the last of keys is seen by head 0 alone."""
    chosen = torch.ones(H, -(-seqlen_q // 16), -(-seqlen_k // 16), dtype=torch.bool)
    chosen[:, 1], chosen[1:, :, -1], chosen[3, :, 0] = False, False, False
    return fk.block_mask(chosen, block_size=16, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def padded(seqlen, real):
    """Documents of which the tokens from `real` on are none."""
    rows = fk.masks.document(torch.arange(seqlen).expand(B, -1) // 9, causal=True).queries.clone()
    rows[[fk.masks.LOW, fk.masks.HIGH], :, real:] = 0
    return fk.masks.Mask(rows, None, seqlen)


# Sq, Sk and the options.
SEEN = {
    "causal": (33, 20, {"causal": True}),
    "window": (9, 40, {"window_size": (5, 2)}),
    "window causal": (40, 17, {"window_size": (3, -1), "causal": True}),
    "padded documents": (24, 24, {"mask": padded(24, 19)}),
    "blocks": (40, 45, {"mask": blocks(40, 45)}),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_holes_do_not_show(attention, inputs, holes, tolerance=0.0):
    """attention(*inputs), the same whatever stands in the holes: a bool tensor for each
    input, which broadcasts."""

    def called(value):
        given = [
            x.detach().masked_fill(hole, value).requires_grad_()
            for x, hole in zip(inputs, holes, strict=True)
        ]
        out = attention(*given)
        weight = draw(*out.shape, seed=3)
        return [out, *torch.autograd.grad((out * weight).sum(), given)]

    wanted = called(0.0)
    assert all(x.isfinite().all() for x in wanted)
    assert any(hole.any() for hole in holes)
    for gradient, hole in zip(wanted[1:], holes, strict=True):
        assert gradient.masked_select(hole).eq(0).all()
    for bad in BAD:
        for one, other in zip(called(bad), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


def first(result):
    return result[0] if isinstance(result, tuple) else result


def holes_of(seqlen_q, seqlen_k, options):
    """Of q, k and v (B, S, heads, D): queries that see nothing, keys that nobody sees."""
    left, right = fk.options.band(
        seqlen_q, seqlen_k, options.get("causal", False), options.get("window_size", (-1, -1))
    )
    mask = options.get("mask")
    bounds = (None, None) if isinstance(mask, fk.masks.Mask) else (left, right)
    options_of_mask = fk.options.Options(1.0, *bounds, mask=mask)
    seen = reference.visible_mask(seqlen_q, seqlen_k, options_of_mask, "cpu").expand(
        B, H, seqlen_q, seqlen_k
    )
    queries, keys = ~seen.any(-1), ~seen.any(-2).unflatten(1, (K, H // K)).any(2)
    return [x.transpose(1, 2)[..., None] for x in (queries, keys, keys)]


@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
@pytest.mark.parametrize("name", SEEN)
def test_rows_that_nobody_sees(name, extra):
    seqlen_q, seqlen_k, options = SEEN[name]
    inputs = (
        draw(B, seqlen_q, H, D),
        draw(B, seqlen_k, K, D, seed=1),
        draw(B, seqlen_k, K, D, seed=2),
    )
    holes = holes_of(seqlen_q, seqlen_k, options)
    called = partial(fk.flash_attn_func, **options, **extra)
    assert_holes_do_not_show(lambda *x: first(called(*x)), inputs, holes)
    kv, called = (
        torch.stack(inputs[1:], 2),
        partial(fk.flash_attn_kvpacked_func, **options, **extra),
    )
    assert_holes_do_not_show(
        lambda *x: first(called(*x)), [inputs[0], kv], [holes[0], holes[1][:, :, None]]
    )


@pytest.mark.parametrize("extra", [{}, EXTRA["lse"], EXTRA["alibi"]], ids=["plain", "lse", "alibi"])
@pytest.mark.parametrize("causal", [True, False])
def test_tokens_beyond_the_last_boundary(causal, extra):
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    options = {"causal": causal, **extra}
    past = torch.arange(17)[:, None, None] >= 12
    q, k, v = draw(17, H, D), draw(17, K, D, seed=1), draw(17, K, D, seed=2)
    kv, qkv = torch.stack((k, v), 1), draw(17, 3, H, D)
    varlen = fk.flash_attn_varlen_func
    assert_holes_do_not_show(
        lambda *x: first(varlen(*x, cu, cu, 7, 7, **options)), (q, k, v), [past] * 3
    )
    packed = fk.flash_attn_varlen_kvpacked_func
    assert_holes_do_not_show(
        lambda *x: first(packed(*x, cu, cu, 7, 7, **options)), (q, kv), [past, past[:, None]]
    )
    packed = fk.flash_attn_varlen_qkvpacked_func
    assert_holes_do_not_show(lambda x: first(packed(x, cu, 7, **options)), [qkv], [past[:, None]])
    # Of 4 rows; page 1 is nobody's.
    pages = torch.tensor([[2, 0], [3, 3], [0, 4]], dtype=torch.int32)
    page = torch.zeros(5, 4, 1, 1, dtype=torch.bool)
    page[1], page[3], page[4, 3:] = True, True, True
    inputs = (q, draw(5, 4, K, D), draw(5, 4, K, D, seed=1))
    assert_holes_do_not_show(
        lambda *x: first(varlen(*x, cu, cu, 7, 7, block_table=pages, **options)),
        inputs,
        [past, page, page],
    )


def test_rows_of_a_cache_that_are_not_filled():
    lengths, pad_of = (
        torch.tensor([6, 11], dtype=torch.int32),
        torch.tensor([2, 0], dtype=torch.int32),
    )
    row = torch.arange(16)
    unfilled = (row < pad_of[:, None]) | (row >= lengths[:, None] + 3)
    clean = [
        draw(B, 16, K, D, seed=seed).masked_fill(unfilled[..., None, None], 0.0) for seed in (1, 2)
    ]
    for window in ((-1, -1), (3, 0)):

        def attend(caches, window=window):
            new = draw(B, 3, K, D, seed=3)
            return fk.flash_attn_with_kvcache(
                draw(B, 3, H, D), *caches, new, new, cache_seqlens=lengths, cache_leftpad=pad_of,
                causal=True,
                window_size=window, return_softmax_lse=True,
            )  # fmt: skip

        wanted = attend([x.clone() for x in clean])
        for bad in BAD:
            spoilt = attend([x.masked_fill(unfilled[..., None, None], bad) for x in clean])
            assert all(map(torch.equal, spoilt, wanted))


def test_masks_of_torchs_function():
    inputs = [
        draw(B, heads, length, D, seed=heads) for heads, length in ((H, 11), (K, 14), (K, 14))
    ]
    attend = partial(fk.scaled_dot_product_attention, enable_gqa=True)
    unseen = torch.arange(14)[:, None] >= 11
    assert_holes_do_not_show(
        lambda k, v: attend(inputs[0], k, v, is_causal=True), inputs[1:], [unseen, unseen]
    )
    blind = torch.arange(11)[:, None] == 4
    visible = torch.rand(B, 1, 11, 14, generator=torch.Generator().manual_seed(0)) < 0.7
    visible[..., 0] = True
    visible = visible & ~blind & ~unseen.mT
    hidden = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    for mask in (visible, hidden):
        assert_holes_do_not_show(
            lambda *x, mask=mask: attend(*x, attn_mask=mask), inputs, [blind, unseen, unseen]
        )


def test_a_bias_where_the_window_hides_the_pair():
    q, k, v = draw(B, 12, H, D), draw(B, 9, K, D, seed=1), draw(B, 9, K, D, seed=2)
    hidden = ~torch.ones(12, 9, dtype=torch.bool).tril(-3)  # the first three queries see nothing

    def attend(bias):
        return fk.flash_attn_func(q, k, v, causal=True, bias=bias)

    assert_holes_do_not_show(attend, [draw(1, H, 12, 9)], [hidden], 1e-14)


def compiled(attention):
    return torch.compile(attention, backend="aot_eager", fullgraph=True)


def mapped(attention):
    return lambda *x: torch.vmap(attention)(*[y[None] for y in x])[0]


@pytest.mark.filterwarnings("ignore:.*performance drop:UserWarning")  # of vmap
@pytest.mark.parametrize(
    ("name", "through"), [("window", compiled), *((name, mapped) for name in SEEN)]
)
def test_compilers_and_transforms_which_allow_no_look(name, through):
    seqlen_q, seqlen_k, options = SEEN[name]
    inputs = (
        draw(B, seqlen_q, H, D),
        draw(B, seqlen_k, K, D, seed=1),
        draw(B, seqlen_k, K, D, seed=2),
    )
    holes = holes_of(seqlen_q, seqlen_k, options)
    called = through(partial(fk.flash_attn_func, **options))
    assert_holes_do_not_show(called, inputs, holes)


# --- what some see --------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mask", ["causal", "window", "blocks", *MASKS])
def test_a_token_that_is_not_finite_spoils_what_sees_it_and_nothing_else(mask, bad):
    case = Case(B, 40, 40, H, K, D, mask)
    dirty = case.inputs(torch.float64)
    with torch.no_grad():
        for x in dirty:
            x[:, 20, :, 3] = bad
    wanted = run(reference.attention, dirty, case.options(), through_lse=False)
    out = fk.flash_attn_func(*dirty, **case.options())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).double()
    got = dict(
        zip(
            ("out", "dq", "dk", "dv"),
            (out, *torch.autograd.grad((out * weight).sum(), dirty)),
            strict=True,
        )
    )
    for name, value in got.items():
        assert torch.equal(value.isfinite(), wanted[name].isfinite())
        torch.testing.assert_close(
            value.nan_to_num(0, 0, 0), wanted[name].nan_to_num(0, 0, 0), atol=1e-12, rtol=0
        )
        assert (~value.isfinite()).any(-1).any()
    assert got["out"].isfinite().any()
