"""What the public functions say about arguments that cannot be: before anything runs, naming the argument."""

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
        rows, torch.zeros(0, dtype=torch.int32), rows, torch.zeros(0, dtype=torch.int32), (16, 16), 6, 5, None, None
    )
    return mask._replace(**changes)


TENSORS = [
    ((None, KV, KV), TypeError, r"q must be a tensor \(B, Sq, H, D\), not NoneType"),
    ((Q[0], KV, KV), ValueError, r"q must have the shape \(B, Sq, H, D\), not \(6, 4, 8\)"),
    ((Q, KV[0], KV), ValueError, r"k must have the shape \(B, Sk, K, D\), not \(5, 2, 8\)"),
    ((Q.long(), KV, KV), TypeError, "q must be float16, bfloat16, float32 or, on the CPU, float64, not int64"),
    ((Q.double(), KV, KV), TypeError, "k has dtype float32 and q has float64"),
    ((Q, KV, KV.bfloat16()), TypeError, "v has dtype bfloat16 and q has float32.*autocast"),
    ((Q, KV.to("meta"), KV), ValueError, "k is on meta and q on cpu"),
    ((Q, KV, KV[:, :3]), ValueError, r"k and v must have the same shape, not \(2, 5, 2, 8\) and \(2, 3, 2, 8\)"),
    ((Q, KV[:1], KV[:1]), ValueError, "q and k must have the same batch size, not 2 and 1"),
    ((Q, KV[..., :4], KV[..., :4]), ValueError, "must have the same head dimension, not 8 and 4"),
    ((Q[:, :, :3], KV, KV), ValueError, "q's heads must be a multiple of k's heads, not 3 and 2"),
    ((Q, KV[:, :, :0], KV[:, :, :0]), ValueError, "q's heads must be a multiple of k's heads, not 4 and 0"),
    ((torch.zeros(1, 2, 1, 257),) * 3, ValueError, "the head dimension must be from 1 to 256, not 257"),
    ((torch.zeros(1, 2, 1, 0),) * 3, ValueError, "the head dimension must be from 1 to 256, not 0"),
]
OPTIONS = [
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be a probability from 0 to less than 1, not 1.0"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be a probability from 0 to less than 1, not -0.1"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p must be a probability from 0 to less than 1, not nan"),
    ({"dropout_p": None}, TypeError, "dropout_p must be a number, not NoneType"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be a positive finite number, not 0.0"),
    ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be a positive finite number, not inf"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a number or None, not str"),
    ({"causal": 1}, TypeError, "causal must be True or False, not 1"),
    ({"deterministic": None}, TypeError, "deterministic must be True or False, not None"),
    ({"return_attn_probs": "yes"}, TypeError, "return_attn_probs must be True or False, not 'yes'"),
    ({"return_lse": 0}, TypeError, "return_lse must be True or False, not 0"),
    ({"window_size": (-2, 0)}, ValueError, r"window_size must be 0 or more on each side, or -1 .* not \(-2, 0\)"),
    ({"window_size": 5}, TypeError, r"window_size must be two integers \(left, right\), not 5"),
    ({"window_size": (1, 2, 3)}, TypeError, "window_size must be two integers"),
    ({"window_size": (1.0, 2)}, TypeError, r"window_size must be two integers \(left, right\), not \(1.0, 2\)"),
    ({"window_size": None}, TypeError, "window_size must be two integers"),
    ({"softcap": -1.0}, ValueError, "softcap must be a positive finite number, or 0 for none, not -1.0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be a positive finite number, or 0 for none, not inf"),
    ({"softcap": True}, TypeError, "softcap must be a number, not bool"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, r"alibi_slopes must be a tensor \(H,\) or \(sequences, H\), not list"),
    ({"alibi_slopes": torch.ones(4).half()}, TypeError, "alibi_slopes must be float32, not float16"),
    ({"alibi_slopes": torch.ones(2)}, ValueError, r"alibi_slopes must have the shape \(H,\) = \(4,\) .* not \(2,\)"),
    ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"\(sequences, H\) = \(2, 4\), not \(3, 4\)"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, ValueError, "alibi_slopes is on meta and q on cpu"),
    ({"bias": 1.0}, TypeError, r"bias must be a tensor that broadcasts to \(B, H, Sq, Sk\), not float"),
    ({"bias": torch.zeros(5).double()}, TypeError, "bias must be float32, not float64"),
    ({"bias": torch.zeros(5, dtype=torch.bool)}, TypeError, "bias must be float32, not bool"),
    ({"bias": torch.zeros(6)}, ValueError, r"bias must broadcast to .* = \(2, 4, 6, 5\), which the shape \(6,\)"),
    ({"bias": torch.zeros(())}, ValueError, r"which the shape \(\) does not"),
    ({"bias": torch.zeros(1, 1, 1, 1, 5)}, ValueError, r"which the shape \(1, 1, 1, 1, 5\) does not"),
    ({"bias": torch.zeros(5, device="meta")}, ValueError, "bias is on meta and q on cpu"),
    ({"dropout_seed": 1.5}, TypeError, "dropout_seed must be an integer or an int64 tensor, not float"),
    ({"dropout_seed": True}, TypeError, "dropout_seed must be an integer or an int64 tensor, not bool"),
    ({"dropout_seed": 2**63}, ValueError, "dropout_seed must fit 64 bits, signed, not 9223372036854775808"),
    ({"dropout_seed": torch.zeros(1)}, TypeError, "dropout_seed must be an int64 tensor or an integer, not float32"),
    ({"dropout_seed": torch.zeros(2).long()}, ValueError, r"1 element, or 3 with offsets, not the shape \(2,\)"),
    ({"dropout_seed": torch.zeros(1).long().to("meta")}, ValueError, "dropout_seed is on meta and q on cpu"),
    ({"mask": torch.ones(6, 5)}, TypeError, "mask must be a Mask .* or a BlockMask .* not Tensor"),
    ({"mask": CAUSAL, "causal": True}, ValueError, r"mask must hold causal and window_size itself: .* not True and"),
    ({"mask": CAUSAL, "window_size": (1, -1)}, ValueError, r"mask must hold causal .* not False and \(1, -1\)"),
    ({"mask": masks.causal(7, 5)}, ValueError, r"mask.queries must be of 6 tokens in 1 or 2 rows.*\(5, 1, 7\)"),
    ({"mask": masks.causal(6, 4)}, ValueError, "mask must be of 5 keys, as k is, not of 4"),
    ({"mask": CAUSAL._replace(queries=CAUSAL.queries.long())}, TypeError, "mask.queries must be int32, not int64"),
    ({"mask": CAUSAL._replace(queries=CAUSAL.queries[:4])}, ValueError, "mask.queries must have 5 or 7 rows, not 4"),
    ({"mask": CAUSAL._replace(queries=CAUSAL.queries.expand(-1, 3, -1))}, ValueError, "in 1 or 2 rows"),
    ({"mask": CAUSAL._replace(keys=torch.zeros(1, 6).int())}, ValueError, "mask.keys must be of 5 tokens"),
    ({"mask": CAUSAL._replace(keys=torch.zeros(2, 5).int())}, ValueError, "as many rows as mask.queries, 1, not 2"),
    ({"mask": masks.causal(6, 5, device="meta")}, ValueError, "mask.queries is on meta and q on cpu"),
    ({"mask": blocks(seqlen_q=7)}, ValueError, "mask must be of 6 queries and 5 keys, as q and k are, not of 7 and 5"),
    ({"mask": blocks(), "causal": True}, ValueError, r"window_size \(the band \(None, -1\)\), not .*None, None"),
    ({"mask": blocks(query_rows=torch.zeros(1, 3, 1, 3))}, ValueError, "1 or 2 rows and 1 or 4 heads.* not of 1 and 3"),
    (
        {"mask": SIX_DOCUMENTS, "alibi_slopes": torch.ones(3, 4)},
        ValueError,
        r"\(sequences, H\) = \(12, 4\), not \(3, 4\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "error", "message"), TENSORS, ids=[mistake[2][:40] for mistake in TENSORS])
def test_tensors_that_cannot_be(tensors, error, message):
    with pytest.raises(error, match=message):
        fk.flash_attn_func(*tensors)


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=[mistake[2][:50] for mistake in OPTIONS])
def test_options_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        fk.flash_attn_func(Q, KV, KV, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"), OPTIONS[:12], ids=[mistake[2][:50] for mistake in OPTIONS[:12]]
)
def test_the_packed_functions_say_the_same(options, error, message):
    with pytest.raises(error, match=message):
        fk.flash_attn_qkvpacked_func(torch.zeros(2, 6, 3, 4, 8), **options)
    with pytest.raises(error, match=message):
        fk.flash_attn_kvpacked_func(Q, torch.zeros(2, 5, 2, 2, 8), **options)


def test_packed_tensors_that_cannot_be():
    with pytest.raises(ValueError, match=r"qkv must have the shape \(B, S, 3, H, D\), not \(2, 6, 4, 8\)"):
        fk.flash_attn_qkvpacked_func(Q)
    with pytest.raises(ValueError, match=r"qkv must have the shape \(B, S, 3, H, D\), not \(2, 6, 2, 4, 8\)"):
        fk.flash_attn_qkvpacked_func(torch.zeros(2, 6, 2, 4, 8))
    with pytest.raises(TypeError, match=r"qkv must be a tensor \(B, S, 3, H, D\), not list"):
        fk.flash_attn_qkvpacked_func([Q])
    with pytest.raises(ValueError, match=r"kv must have the shape \(B, Sk, 2, K, D\), not \(2, 5, 3, 2, 8\)"):
        fk.flash_attn_kvpacked_func(Q, torch.zeros(2, 5, 3, 2, 8))
    with pytest.raises(ValueError, match="q and kv must have the same batch size, not 2 and 1"):
        fk.flash_attn_kvpacked_func(Q, torch.zeros(1, 5, 2, 2, 8))
    with pytest.raises(TypeError, match="kv has dtype float64 and q has float32"):
        fk.flash_attn_kvpacked_func(Q, torch.zeros(2, 5, 2, 2, 8).double())


def test_a_mistake_draws_no_random_number():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="bias must broadcast"):
        fk.flash_attn_func(Q, KV, KV, 0.5, bias=torch.zeros(6))
    assert torch.equal(torch.get_rng_state(), state)
