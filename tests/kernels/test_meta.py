"""Meta tensors: every function gives the shapes, dtypes and strides that it gives on the
CPU, gradients included."""

import pytest
import torch

import flashtrain_kernels as fk
from flashtrain_kernels.flash_attn import flash_attn_heads_first

B, S, H, K, D = 2, 24, 4, 2, 16
SHAPES = {
    "q": (B, S, H, D),
    "k": (B, S, K, D),
    "v": (B, S, K, D),
    "kv": (B, S, 2, K, D),
    "qkv": (B, S, 3, H, D),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.2},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 5.0, "return_lse": True},
    "dropout": {"dropout_p": 0.1, "return_attn_probs": True},
    "alibi": {"alibi_slopes": torch.ones(H)},
    "sink": {"learnable_sink": torch.ones(H), "return_lse": True},
}
MASKS = {
    "document": lambda: fk.masks.document(torch.arange(S).expand(B, S) // 7, causal=True),
    "planned": lambda: fk.masks.sliding_window(S, (4, 0)).planned(D, torch.float32),
    "blocks": lambda: fk.block_mask(
        torch.ones(1, 2, 2, dtype=torch.bool), block_size=16, seqlen_q=S, seqlen_k=S
    ),
}


def placed(x, device):
    """A tensor, or what holds some, on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        parts = [placed(part, device) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return {name: placed(part, device) for name, part in x.items()} if isinstance(x, dict) else x


def described(function, device, dtype, names, *rest, row=False, **options):
    """What the function gives for these tensors, and their gradients' shapes and dtypes."""
    inputs = [
        torch.zeros(SHAPES[name][row:], dtype=dtype, device=device, requires_grad=True)
        for name in names
    ]
    results = function(*inputs, *placed(rest, device), **placed(options, device))
    results = results if isinstance(results, tuple) else (results,)
    differentiable = [x.sum() for x in results if x.requires_grad]
    gradients = torch.autograd.grad(differentiable, inputs) if differentiable else []
    return [(x.shape, x.dtype, x.stride(), x.device.type == device) for x in results] + [
        (x.shape, x.dtype, x.device.type == device) for x in gradients
    ]


def assert_as_on_the_cpu(function, names, *rest, dtype=torch.float32, **options):
    assert described(function, "meta", dtype, names, *rest, **options) == described(
        function, "cpu", dtype, names, *rest, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_six_functions(options, dtype):
    cu = torch.tensor([0, 10, 22], dtype=torch.int32)
    assert_as_on_the_cpu(fk.flash_attn_func, ["q", "k", "v"], dtype=dtype, **options)
    assert_as_on_the_cpu(fk.flash_attn_kvpacked_func, ["q", "kv"], dtype=dtype, **options)
    assert_as_on_the_cpu(fk.flash_attn_qkvpacked_func, ["qkv"], dtype=dtype, **options)
    packed = {"dtype": dtype, "row": True, **options}
    assert_as_on_the_cpu(fk.flash_attn_varlen_func, ["q", "k", "v"], cu, cu, 12, 12, **packed)
    assert_as_on_the_cpu(fk.flash_attn_varlen_kvpacked_func, ["q", "kv"], cu, cu, 12, 12, **packed)
    assert_as_on_the_cpu(fk.flash_attn_varlen_qkvpacked_func, ["qkv"], cu, 12, **packed)


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_and_a_bias(make):
    assert_as_on_the_cpu(fk.flash_attn_func, ["q", "k", "v"], mask=make())
    assert_as_on_the_cpu(
        fk.flash_attn_func, ["q", "k", "v"], mask=make(), bias=torch.zeros(H, S, 1), return_lse=True
    )
    bias = torch.zeros(H, S, 1, device="meta", requires_grad=True)
    q = torch.zeros(SHAPES["q"], device="meta")
    (gradient,) = torch.autograd.grad(fk.flash_attn_func(q, q, q, bias=bias).sum(), bias)
    assert (gradient.shape, gradient.dtype) == (bias.shape, bias.dtype)


def test_the_other_forms():
    heads_first = [lambda *x, f=f, **o: f(*[y.transpose(1, 2) for y in x], **o)
                   for f in (fk.scaled_dot_product_attention, flash_attn_heads_first)]  # fmt: skip
    for options in (
        {},
        {"is_causal": True},
        {"dropout_p": 0.1},
        {"attn_mask": torch.ones(S, S, dtype=torch.bool)},
    ):
        assert_as_on_the_cpu(heads_first[0], ["q", "k", "v"], enable_gqa=True, **options)
    assert_as_on_the_cpu(heads_first[1], ["q", "k", "v"], causal=True)
    pages = torch.zeros(2, 2, dtype=torch.int32)
    cu = torch.tensor([0, 10, 24], dtype=torch.int32)

    def paged(q, k, v, cu, pages):
        return fk.flash_attn_varlen_func(q[0], k, v, cu, cu, 14, 14, causal=True, block_table=pages)

    assert_as_on_the_cpu(paged, ["q", "k", "v"], cu, pages)

    def cached(q, k, v, lengths, rotary):
        with torch.no_grad():
            cache = [torch.cat((x, x), 1) for x in (k, v)]
            return fk.flash_attn_with_kvcache(
                q, *cache, k, v, rotary, rotary, lengths, return_softmax_lse=True
            )

    assert_as_on_the_cpu(
        cached, ["q", "k", "v"], torch.tensor([0, 5], dtype=torch.int32), torch.ones(2 * S, 4)
    )


def test_parts_of_attention_the_loss_and_the_feed_forward():
    def parts(q, k, v):
        found = fk.attention_forward(q, k, v)
        return *fk.merge_attention([found, found]), *fk.attention_backward(q, q, k, v, *found)

    assert_as_on_the_cpu(parts, ["q", "k", "v"])

    def loss(q, k):
        return fk.linear_cross_entropy(
            q, k[0, :, 0], torch.zeros_like(q[..., 0], dtype=torch.int64)
        )

    assert_as_on_the_cpu(loss, ["q", "k"])

    def feed_forward(q, k):
        up, bias = k[0, :, 0], k[0, :, 0, 0]
        return fk.gelu_feed_forward(q, up, bias, up.mT, q[0, 0, 0])

    assert_as_on_the_cpu(feed_forward, ["q", "k"])
