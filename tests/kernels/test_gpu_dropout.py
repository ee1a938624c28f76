"""Dropout on a GPU: which weights the kernels drop, against the reference's draw, and that
nothing else changes it."""

import pytest
import torch
from attention_cases import Case
from gpu_checks import DEVICE, NEEDS_GPU, captured, even_weights, weights_seen
from torch.utils.checkpoint import checkpoint

import flashtrain_kernels as fk
from flashtrain_kernels import reference
from flashtrain_kernels.options import Options, seed_tensor

pytestmark = NEEDS_GPU
SEED = 1234567890123


def kept_by_the_reference(batch, seqlen_q, seqlen_k, heads, p, mask=None, seed=SEED):
    options = Options(0.125, dropout_p=p, seed=seed_tensor(seed, torch.device(DEVICE)), mask=mask)
    return reference.dropout_mask(
        (batch, seqlen_q, heads, 64), (batch, seqlen_k, heads, 64), options, DEVICE
    )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_one_minus_p(p):
    weights = even_weights(2, 700, 256, 4, dropout_p=p, dropout_seed=SEED)
    kept = weights > 0
    spread = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * spread
    torch.testing.assert_close(
        weights[kept].double().mean().item(), 1 / 256 / (1 - p), atol=0, rtol=2e-3
    )


# The Hopper kernels serve the second: Sk - Sq is a multiple of 16.
@pytest.mark.parametrize("keys", [389, 380])
@pytest.mark.parametrize("seed", [SEED, -5, 2**62 + 12345], ids=str)
def test_the_kernels_drop_what_the_references_mask_says(seed, keys):
    kept = even_weights(2, 300, keys, 3, dropout_p=0.4, dropout_seed=seed) > 0
    assert torch.equal(kept, kept_by_the_reference(2, 300, keys, 3, 0.4, seed=seed))


@pytest.mark.parametrize(("keys", "head_dim"), [(389, 64), (380, 64), (380, 128)])
def test_the_backward_drops_what_the_references_mask_says(keys, head_dim):
    q, k, v = (
        torch.zeros(2, size, 3, head_dim, device=DEVICE, dtype=torch.float16)
        for size in (300, keys, keys)
    )
    out = fk.flash_attn_func(q, k, v.requires_grad_(), 0.4, dropout_seed=SEED)
    seen = []
    for first in range(0, 300, head_dim):  # dV of a query by itself, in a dimension of its own
        dout = torch.zeros_like(out)
        number = min(head_dim, 300 - first)
        dout[:, first : first + number] = torch.eye(head_dim, device=DEVICE, dtype=dout.dtype)[
            :number, None
        ]
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        seen.append(dv.permute(0, 2, 3, 1)[:, :, :number] > 0)
    assert torch.equal(torch.cat(seen, 2), kept_by_the_reference(2, 300, keys, 3, 0.4))


@pytest.mark.parametrize("name", ["causal document", "shuffled"])
def test_the_kernels_drop_what_the_references_mask_says_within_documents(name):
    mask = Case(2, 301, 301, 3, 3, 64, name).options(DEVICE)["mask"]
    seen = even_weights(2, 301, 301, 3, mask=mask) > 0
    kept = even_weights(2, 301, 301, 3, mask=mask, dropout_p=0.4, dropout_seed=SEED) > 0
    assert torch.equal(seen, mask.dense()[:, None].expand_as(seen))
    assert torch.equal(kept, seen & kept_by_the_reference(2, 301, 301, 3, 0.4, mask))


def test_the_returned_probabilities_are_negative_where_the_kernels_drop():
    q, k, v = (x.detach() for x in Case(2, 133, 261, 4, 2, 64).inputs(torch.float16, DEVICE))
    options = {"dropout_p": 0.4, "dropout_seed": SEED, "causal": True}
    out, _, probabilities = fk.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert probabilities.shape == (2, 4, 133, 261)
    assert probabilities.dtype == torch.float16
    assert torch.equal(out, fk.flash_attn_func(q, k, v, **options))
    used = weights_seen(lambda *qkv: fk.flash_attn_func(*qkv, **options), q, k)
    torch.testing.assert_close(used, probabilities.clamp(min=0) / 0.6, atol=2e-3, rtol=2e-3)
    assert torch.equal(probabilities.signbit(), ~kept_by_the_reference(2, 133, 261, 4, 0.4))
    assert fk.flash_attn_func(q, k, v, return_attn_probs=True)[2].shape == (0,)


def test_packed_sequences_draw_what_they_do_as_a_batch():
    q = torch.zeros(3, 100, 2, 64, device=DEVICE, dtype=torch.float16)
    cu = torch.tensor([0, 100, 200, 300], device=DEVICE, dtype=torch.int32)
    apart = even_weights(3, 100, 100, 2, dropout_p=0.5, dropout_seed=SEED) > 0
    row = q.reshape(1, 300, 2, 64)
    packed = weights_seen(
        lambda q, k, v: fk.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, 100, 100, 0.5, dropout_seed=SEED
        )[None], row, row,
    )  # fmt: skip
    for number in range(3):
        tokens = slice(number * 100, number * 100 + 100)
        assert torch.equal(packed[0, :, tokens, tokens] > 0, apart[number])


def assert_same_draws(got, wanted):
    """Equal but for the order in which dQ is added up, which may differ from run to run."""
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3 * other.abs().max().item(), rtol=1e-3)


def test_recomputation_draws_the_same():
    inputs = Case(2, 333, 461, 4, 4, 64).inputs(torch.float16, DEVICE)
    gradients = []
    for wrap in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(0)
        out = wrap(lambda *x: fk.flash_attn_func(*x, 0.3, causal=True) * 1.0, *inputs)
        gradients.append(torch.autograd.grad(out.float().sum(), inputs))
    assert_same_draws(*gradients)


def test_a_cuda_graph_draws_by_the_seed_that_its_tensor_holds_when_it_is_replayed():
    inputs = Case(2, 333, 461, 4, 4, 64).inputs(torch.float16, DEVICE)
    seed = torch.tensor([1, 0, 0], device=DEVICE)

    def step(seed=seed):
        out = fk.flash_attn_func(*inputs, 0.3, causal=True, dropout_seed=seed)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), inputs)]

    graph, outputs = captured(step)
    for number in (1, 2, SEED):
        seed.copy_(torch.tensor([number, 0, 0]))
        graph.replay()
        assert_same_draws(outputs, step(number))


@pytest.mark.parametrize("seed", [None, 7])
def test_a_cuda_graph_without_a_seed_draws_anew_in_each_replay_and_a_number_stays(seed):
    q, k, v = (x.detach() for x in Case(2, 333, 461, 4, 4, 64).inputs(torch.float16, DEVICE))
    graph, (out,) = captured(
        lambda: [fk.flash_attn_func(q, k, v, 0.3, causal=True, dropout_seed=seed)]
    )
    graph.replay()
    first = out.clone()
    graph.replay()
    assert torch.equal(first, out) == (seed is not None)
