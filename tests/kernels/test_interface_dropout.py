"""Dropout through the public functions: what decides a draw, and that parts of a call
draw what the whole does."""

import torch
from plain_formula import tensors

import flashtrain_kernels as fk
from flashtrain_kernels import masks


def test_the_seed_may_be_a_number_or_a_tensor_and_decides_the_draw():
    q, k, v = tensors()
    first = fk.flash_attn_func(q, k, v, 0.5, dropout_seed=5)
    for seed in (5, torch.tensor(5), torch.tensor([5]), torch.tensor([5, 0, 0])):
        assert torch.equal(fk.flash_attn_func(q, k, v, 0.5, dropout_seed=seed), first)
    assert not torch.equal(fk.flash_attn_func(q, k, v, 0.5, dropout_seed=6), first)
    # Without dropout a seed means nothing, and nothing is drawn.
    state = torch.get_rng_state()
    assert torch.equal(fk.flash_attn_func(q, k, v, dropout_seed=5), fk.flash_attn_func(q, k, v))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_torchs_generator_gives_one():
    q, k, v = tensors()
    torch.manual_seed(0)
    first, second = fk.flash_attn_func(q, k, v, 0.5), fk.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(fk.flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(first, second)


def test_a_part_of_the_batch_or_of_the_heads_draws_what_the_whole_does():
    q, k, v = tensors(batch=3, heads=4, kv_heads=4)
    whole = fk.flash_attn_func(q, k, v, 0.5, dropout_seed=9)
    part = fk.flash_attn_func(q[1:], k[1:], v[1:], 0.5, dropout_seed=torch.tensor([9, 1, 0]))
    torch.testing.assert_close(part, whole[1:])
    part = fk.flash_attn_func(
        *(x[:, :, 2:] for x in (q, k, v)), 0.5, dropout_seed=torch.tensor([9, 0, 2])
    )
    torch.testing.assert_close(part, whole[:, :, 2:])


def test_a_part_of_the_queries_draws_what_the_whole_does():
    q, k, v = tensors(seqlen_q=9)
    whole = fk.flash_attn_func(q, k, v, 0.5, causal=True, dropout_seed=9)
    part = fk.flash_attn_func(q[:, 4:], k, v, 0.5, causal=True, dropout_seed=9)
    torch.testing.assert_close(part, whole[:, 4:])
    order = torch.randperm(9)
    back, mask = order.flip(0), masks.causal(9).select(order, order.flip(0))
    shuffled = fk.flash_attn_func(
        q[:, order], k[:, back], v[:, back], 0.5, mask=mask, dropout_seed=9
    )
    torch.testing.assert_close(shuffled, whole[:, order])
