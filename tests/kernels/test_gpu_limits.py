"""The limits on a GPU: tensors of more than 2^31 elements, rows of a million tokens, memory
that grows with the length alone. Checked against float64 on some queries and some keys, which
needs no whole score matrix.

S sequence, H heads, D head dimension; all of these have one batch row and one
key head a query head.
"""

import gc
from typing import NamedTuple

import pytest
import torch
from gpu_checks import DEVICE, NEEDS_GPU
from torch import Tensor

import flashtrain_kernels as fk
from flashtrain_kernels import block_sparse

pytestmark = NEEDS_GPU
BF16 = torch.bfloat16
GIB = 2**30


@pytest.fixture(autouse=True)
def enough_memory():
    gc.collect()  # what another test left behind would be freed within a measured call
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * GIB:
        pytest.skip("needs 60 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


class Run(NamedTuple):
    """One call and its gradients, (S, H, D) each; lse (H, S); peak: bytes
    allocated on top of the inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    gradients: tuple[Tensor, ...]
    peak: int


def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, call) -> Run:
    """Run call(q, k, v, *more) -> (out, lse), batched or packed, forward and backward."""
    inputs = [x.requires_grad_() for x in (q, k, v, *more)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = call(*inputs)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    peak = torch.cuda.max_memory_allocated() - before
    return Run(*(x.detach() for x in (q, k, v, out, lse, dout)), gradients, peak)


def assert_rows_are_exact(
    run: Run, rows: Tensor, seen: Tensor, bias: Tensor | None = None
) -> Tensor:
    """out, lse and dQ of the queries `rows` (n,) against float64; seen: (n, S) or (H, n,
    S) bool, bias: (n, S).

    Returns the gradient of those rows' scores, (H, n, S).
    """
    q, k, v, dout = (
        x.double().transpose(0, 1) for x in (run.q[rows], run.k, run.v, run.dout[rows])
    )
    scale = run.q.shape[-1] ** -0.5
    scores = q @ k.transpose(1, 2) * scale
    scores = (scores if bias is None else scores + bias.double()).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1)
    out = weights @ v
    dweights = dout @ v.transpose(1, 2)
    dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True))
    assert_near(run.out[rows].transpose(0, 1), out)
    torch.testing.assert_close(
        run.lse[:, rows].double(), torch.logsumexp(scores, -1), atol=1e-4, rtol=0
    )
    assert_near(run.gradients[0][rows].transpose(0, 1), dscores @ k * scale)
    return dscores


def assert_keys_are_exact(run: Run, keys: Tensor, seen: Tensor) -> None:
    """dK and dV of the keys (n,) against float64, from the outputs and log-sum-exps that the
    queries got; seen: (S, n) or (H, S, n) bool."""
    q, k, v, out, dout = (
        x.double().transpose(0, 1) for x in (run.q, run.k[keys], run.v[keys], run.out, run.dout)
    )
    scale = run.q.shape[-1] ** -0.5
    scores = q @ k.transpose(1, 2) * scale
    weights = torch.exp(scores - run.lse.double()[..., None]).masked_fill(~seen, 0.0)
    dscores = weights * (dout @ v.transpose(1, 2) - (dout * out).sum(-1, keepdim=True))
    assert_near(run.gradients[2][keys].transpose(0, 1), weights.transpose(1, 2) @ dout)
    assert_near(run.gradients[1][keys].transpose(0, 1), dscores.transpose(1, 2) @ q * scale)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert (got.double() - wanted).abs().max() <= 0.02 * wanted.abs().max()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16)


def test_packed_qkv_of_more_than_two_to_the_31_elements():
    length, document, heads = 1_000_000, 8192, 12
    qkv = randn(1, length, 3, heads, 64).requires_grad_()
    assert qkv.numel() > 2**31
    mask = fk.masks.document(torch.arange(length, device=DEVICE)[None] // document, causal=True)
    out = fk.flash_attn_qkvpacked_func(qkv, mask=mask.planned(64, BF16))
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, qkv, dout)
    for first in (0, 950_272, length - length % document):  # the second and third lie past 2^31
        part = slice(first, min(first + document, length))
        alone = qkv.detach()[:, part].clone().requires_grad_()
        wanted = fk.flash_attn_qkvpacked_func(alone, causal=True)
        torch.testing.assert_close(out[:, part], wanted, atol=1e-2, rtol=1e-2)
        (want,) = torch.autograd.grad(wanted, alone, dout[:, part])
        assert_near(got[:, part], want.double())


def test_an_output_of_more_than_two_to_the_31_elements():
    length, heads = 1_100_000, 32
    q = randn(1, length, heads, 64)
    assert q.numel() > 2**31
    k, v = randn(1, length, 1, 64), randn(1, length, 1, 64)
    out = fk.flash_attn_func(q, k, v, window_size=(255, 0))
    tail = slice(length - 1000, length)
    before = slice(length - 1255, length)
    wanted = fk.flash_attn_func(q[:, tail], k[:, before], v[:, before], window_size=(255, 0))
    torch.testing.assert_close(out[:, tail], wanted, atol=1e-2, rtol=1e-2)


def test_gradients_of_more_than_two_to_the_31_elements():
    length, heads, tail = 600_000, 16, slice(-1000, None)
    q, k, v = (randn(1, length, n, 256) for n in (heads, 1, 1))
    assert q.numel() > 2**31

    def gradients(q, k, v, dout):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(fk.flash_attn_func(*inputs, window_size=(255, 0)), inputs, dout)

    dout = torch.randn_like(q)
    got, before = gradients(q, k, v, dout), slice(-1255, None)
    wanted = gradients(q[:, tail], k[:, before], v[:, before], dout[:, tail])
    assert_near(got[0][:, tail], wanted[0].double())
    for one, other in zip(got[1:], wanted[1:], strict=True):
        # Whose queries are all among the last thousand.
        assert_near(one[:, -700:], other[:, -700:].double())


def test_a_bias_of_more_than_two_to_the_31_elements_and_its_gradient():
    length, heads = 47_000, 2
    bias = randn(1, 1, length, length)
    assert bias.numel() > 2**31

    def call(q, k, v, bias):
        out, lse = fk.flash_attn_func(q[None], k[None], v[None], bias=bias, return_lse=True)
        return out[0], lse[0]

    run = attend(*(randn(length, heads, 64) for _ in range(3)), bias, call=call)
    for rows in (torch.arange(8, device=DEVICE), torch.arange(length - 8, length, device=DEVICE)):
        seen = torch.ones(8, length, device=DEVICE, dtype=torch.bool)
        dscores = assert_rows_are_exact(run, rows, seen, bias[0, 0, rows].detach())
        assert_near(run.gradients[3][0, 0, rows], dscores.sum(0))


def test_sequences_packed_into_a_row_of_a_million_tokens_take_memory_in_proportion_to_it():
    peaks = {}
    for length in (500_000, 1_000_000):
        first = length * 3 // 10
        cu = torch.tensor([0, first, length], device=DEVICE, dtype=torch.int32)

        def call(q, k, v, cu=cu, length=length):
            return fk.flash_attn_varlen_func(
                q, k, v, cu, cu, length, length, causal=True, return_lse=True
            )

        run = attend(*(randn(length, 1, 64) for _ in range(3)), call=call)
        index = torch.arange(length, device=DEVICE)
        for rows in (index[first - 4 : first + 4], index[-8:]):
            start = torch.where(rows < first, 0, first)[:, None]
            assert_rows_are_exact(run, rows, (index >= start) & (index <= rows[:, None]))
        keys = index[first : first + 8]
        assert_keys_are_exact(run, keys, index[:, None] >= keys)
        peaks[length] = run.peak / (run.q.numel() * 2)  # in tensors of q's size
    assert peaks[1_000_000] <= 1.1 * peaks[500_000]
    assert peaks[1_000_000] < 10


def test_blocks_of_a_row_of_256k_tokens_take_memory_in_proportion_to_the_blocks():
    length, heads, size = 262_144, 2, 128
    count = length // size
    chosen = block_sparse.local_global(count, count, local=2, globals=1, device=DEVICE)
    chosen = chosen | block_sparse.random(heads, count, count, 0.01, seed=1, device=DEVICE)
    mask = fk.block_mask(chosen, block_size=size, seqlen_q=length, seqlen_k=length, causal=True)
    assert mask.density() < 0.02

    def call(q, k, v):
        out, lse = fk.flash_attn_func(
            q[None], k[None], v[None], causal=True, mask=mask, return_lse=True
        )
        return out[0], lse[0]

    run = attend(*(randn(length, heads, 64) for _ in range(3)), call=call)
    index = torch.arange(length, device=DEVICE)
    blocks = mask.blocks()[0]  # (H, nq, nk)
    for rows in (index[1000:1008], index[200_060:200_068], index[-8:]):
        seen = blocks[:, rows // size].repeat_interleave(size, 2) & (index <= rows[:, None])
        assert_rows_are_exact(run, rows, seen)
    for keys in (index[60:68], index[131_068:131_076], index[-8:]):
        seen = blocks[:, :, keys // size].repeat_interleave(size, 1) & (index[:, None] >= keys)
        assert_keys_are_exact(run, keys, seen)
    assert run.peak < 10 * run.q.numel() * 2
