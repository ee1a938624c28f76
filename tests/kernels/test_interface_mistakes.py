"""What the public functions say about arguments that cannot be: before anything
runs, naming the argument."""

import pytest
import torch

import flashtrain_kernels as fk
from flashtrain_kernels import BlockMask, masks

Q = torch.zeros(2, 6, 4, 8)
KV = torch.zeros(2, 5, 2, 8)
CAUSAL = masks.causal(6, 5)
SIX_DOCUMENTS = masks.document(torch.arange(6)[None], causal=True)._replace(seqlen_k=5)


def blocks(**changes):
    """A mask of one block for 6 queries and 5 keys, without a band."""
    rows = torch.zeros(1, 1, 1, 3, dtype=torch.int64)
    mask = BlockMask(
        rows,
        torch.zeros(0, dtype=torch.int32),
        rows,
        torch.zeros(0, dtype=torch.int32),
        (16, 16),
        6,
        5,
        None,
        None,
    )
    return mask._replace(**changes)


WIDE, NARROW = torch.zeros(1, 2, 1, 513), torch.zeros(1, 2, 1, 0)
TENSORS = [
    ((None, KV, KV), TypeError, "q"),
    ((Q[0], KV, KV), ValueError, "q"),
    ((Q, KV[0], KV), ValueError, "k"),
    ((Q.long(), KV, KV), TypeError, "q"),
    ((Q.double(), KV, KV), TypeError, "k"),
    ((Q, KV, KV.bfloat16()), TypeError, "v .*autocast"),
    ((Q, KV.to("meta"), KV), ValueError, "k"),
    ((Q, KV, KV[:, :3]), ValueError, "k and v"),
    ((Q, KV[:1], KV[:1]), ValueError, "q and k"),
    ((Q, KV[..., :4], KV[..., :4]), ValueError, ".*head dimension"),
    ((Q[:, :, :3], KV, KV), ValueError, "q's heads"),
    ((Q, KV[:, :, :0], KV[:, :, :0]), ValueError, "q's heads"),
    ((WIDE, WIDE, WIDE), ValueError, "the head dimension"),
    ((NARROW, NARROW, NARROW), ValueError, "the head dimension"),
]
HALF_BLOCKS = blocks(query_rows=torch.zeros(1, 3, 1, 3))
# Of each option what is of another type, and what is of none of its values.
OPTIONS = {
    "dropout_p": ([None], [1.0, -0.1, float("nan")]),
    "softmax_scale": (["1"], [0.0, float("inf")]),
    "causal": ([1], []),
    "deterministic": ([None], []),
    "return_attn_probs": (["yes"], []),
    "return_lse": ([0], []),
    "window_size": ([5, (1, 2, 3), (1.0, 2), None], [(-2, 0)]),
    "softcap": ([True], [-1.0, float("inf")]),
    "alibi_slopes": (
        [[1.0] * 4, torch.ones(4).half()],
        [torch.ones(2), torch.ones(3, 4), torch.ones(4, device="meta")]
    ),
    "bias": (
        [1.0, torch.zeros(5).double(), torch.zeros(5, dtype=torch.bool)],
        [torch.zeros(6), torch.zeros(()), torch.zeros(1, 1, 1, 1, 5),
            torch.zeros(5, device="meta")],
    ),
    "dropout_seed": (
        [1.5, True, torch.zeros(1)],
        [2**63, torch.zeros(2).long(), torch.zeros(1).long().to("meta")]
    ),
    "mask": (
        [torch.ones(6, 5), CAUSAL._replace(queries=CAUSAL.queries.long())],
        [
            masks.causal(7, 5), masks.causal(6, 4), CAUSAL._replace(queries=CAUSAL.queries[:4]),
            CAUSAL._replace(queries=CAUSAL.queries.expand(-1, 3, -1)),
            CAUSAL._replace(keys=torch.zeros(1, 6).int()),
            CAUSAL._replace(keys=torch.zeros(2, 5).int()),
            masks.causal(6, 5, device="meta"), blocks(seqlen_q=7), HALF_BLOCKS,
        ],
    ),
}  # fmt: skip
WRONG = [(name, TypeError, value) for name, (types, _) in OPTIONS.items() for value in types]
WRONG += [(name, ValueError, value) for name, (_, values) in OPTIONS.items() for value in values]
TOGETHER = [
    {"mask": CAUSAL, "causal": True}, {"mask": CAUSAL, "window_size": (1, -1)},
    {"mask": blocks(), "causal": True},
    {"alibi_slopes": torch.ones(3, 4), "mask": SIX_DOCUMENTS},
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "error", "named"), TENSORS)
def test_tensors_that_cannot_be(tensors, error, named):
    with pytest.raises(error, match=f"^{named}"):
        fk.flash_attn_func(*tensors)


@pytest.mark.parametrize(("name", "error", "value"), WRONG)
def test_options_that_cannot_be(name, error, value):
    with pytest.raises(error, match=name):
        fk.flash_attn_func(Q, KV, KV, **{name: value})


@pytest.mark.parametrize("options", TOGETHER)
def test_options_that_cannot_be_together(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}|window_size"):
        fk.flash_attn_func(Q, KV, KV, **options)


QKV, PACKED = torch.zeros(2, 6, 3, 4, 8), torch.zeros(2, 5, 2, 2, 8)
OF_PACKED = [
    (fk.flash_attn_qkvpacked_func, (Q,), ValueError, "qkv"),
    (fk.flash_attn_qkvpacked_func, (QKV[:, :, :2],), ValueError, "qkv"),
    (fk.flash_attn_qkvpacked_func, ([Q],), TypeError, "qkv"),
    (fk.flash_attn_qkvpacked_func, (QKV, "no such"), TypeError, "dropout_p"),
    (fk.flash_attn_kvpacked_func, (Q, PACKED[:, :, [0, 1, 1]]), ValueError, "kv"),
    (fk.flash_attn_kvpacked_func, (Q, PACKED[:1]), ValueError, "q and kv"),
    (fk.flash_attn_kvpacked_func, (Q, PACKED.double()), TypeError, "kv"),
    (fk.flash_attn_kvpacked_func, (Q, PACKED, "no such"), TypeError, "dropout_p"),
]


@pytest.mark.parametrize(("function", "given", "error", "named"), OF_PACKED)
def test_packed_tensors_that_cannot_be(function, given, error, named):
    with pytest.raises(error, match=f"^{named}"):
        function(*given)


def test_a_mistake_draws_no_random_number():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="bias must broadcast"):
        fk.flash_attn_func(Q, KV, KV, 0.5, bias=torch.zeros(6))
    assert torch.equal(torch.get_rng_state(), state)
