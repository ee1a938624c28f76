"""What torch's FLOP counter sees: two products of each visible pair forward, five
backward, 2 D operations each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import window_pairs
from torch.utils.flop_counter import FlopCounterMode

import flashtrain_kernels as fk
from flashtrain_kernels import masks, ops

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, KV_HEADS, HEAD_DIM = 2, 7, 10, 4, 2, 8
BANDS = [
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"window_size": (-1, 2)},
    {"window_size": (0, -1)},
]

pytestmark = pytest.mark.usefixtures("through_the_operators")
bounds = st.none() | st.integers(-14, 14)


@settings(max_examples=300)
@given(seqlen_q=st.integers(0, 9), seqlen_k=st.integers(0, 9), left=bounds, right=bounds)
def test_visible_pairs_are_those_of_the_band(seqlen_q, seqlen_k, left, right):
    if left is not None and right is not None and left > right:
        left, right = right, left
    pairs = sum(
        (left is None or j >= i + left) and (right is None or j <= i + right)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
    )
    assert ops.visible_pairs(seqlen_q, seqlen_k, left, right) == pairs


def test_visible_pairs_of_a_million_tokens_are_counted_exactly():
    n = 2**20
    assert ops.visible_pairs(n, n) == n * n
    assert ops.visible_pairs(n, n, None, 0) == n * (n + 1) // 2


def counted(run):
    """The operators' FLOPs by name, as (name without the namespace, FLOPs);
    nothing else may count."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {
        str(op).removeprefix("flashtrain_kernels."): n
        for op, n in counter.get_flop_counts()["Global"].items()
    }


def draw(*shape):
    return torch.randn(shape, requires_grad=True)


def call(packing, seqlen_q, options):
    if packing == "qkvpacked":
        return fk.flash_attn_qkvpacked_func(draw(BATCH, seqlen_q, 3, HEADS, HEAD_DIM), **options)
    q = draw(BATCH, seqlen_q, HEADS, HEAD_DIM)
    if packing == "kvpacked":
        return fk.flash_attn_kvpacked_func(
            q, draw(BATCH, SEQLEN_K, 2, KV_HEADS, HEAD_DIM), **options
        )
    k, v = (draw(BATCH, SEQLEN_K, KV_HEADS, HEAD_DIM) for _ in range(2))
    return fk.flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("packing", ["", "qkvpacked", "kvpacked"])
def test_forward_and_backward_count_the_pairs_of_the_window_by_query_heads(packing, options):
    seqlen_q = SEQLEN_K if packing == "qkvpacked" else SEQLEN_Q
    window = options.get("window_size", (-1, -1))
    pairs = int(window_pairs(seqlen_q, SEQLEN_K, *window, options.get("causal", False)).sum())
    product = 2 * BATCH * HEADS * HEAD_DIM * pairs
    suffix = f"_{packing}" * bool(packing)
    assert counted(lambda: call(packing, seqlen_q, options).sum().backward()) == {
        f"forward{suffix}": 2 * product,
        f"backward{suffix}": 5 * product,
    }


def test_what_a_mask_hides_is_counted_as_computed():
    product = 2 * BATCH * HEADS * HEAD_DIM * SEQLEN_Q * SEQLEN_K
    mask = masks.causal(SEQLEN_Q, SEQLEN_K)
    assert counted(lambda: call("", SEQLEN_Q, {"mask": mask})) == {"forward": 2 * product}


def test_varlen_counts_the_packed_row():
    q = draw(9, HEADS, HEAD_DIM)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    product = 2 * HEADS * HEAD_DIM * 9 * 9
    assert counted(lambda: fk.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 5, 5)) == {
        "forward": 2 * product
    }


def test_products_with_narrower_values_count_as_narrow():
    shape = BATCH, SEQLEN_K, HEADS
    q, k, v = draw(*shape, HEAD_DIM), draw(*shape, HEAD_DIM), draw(*shape, 2)
    pairs = 2 * BATCH * HEADS * SEQLEN_K**2
    assert counted(lambda: fk.flash_attn_func(q, k, v).sum().backward()) == {
        "forward": (HEAD_DIM + 2) * pairs,
        "backward": (3 * HEAD_DIM + 2 * 2) * pairs,
    }
