"""torch.func's transforms of the operators equal a loop over the samples: outputs,
log-sum-exps and gradients."""

import pytest
import torch
from torch.func import grad, jacrev, vmap

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, masks
from flashtrain_kernels.masks.plan import PLAN

N, B, S, H, K, D = 3, 2, 21, 4, 2, 4  # N samples
BLOCKS = (16,) * 6

pytestmark = pytest.mark.usefixtures("through_the_operators")


def draw(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    )


def qkv(*samples, batch=B):
    """q, k and v with these dimensions in front."""
    return (
        draw(*samples, batch, S, H, D),
        draw(*samples, batch, S, K, D),
        draw(*samples, batch, S, K, D, seed=1),
    )


def both(attention, *inputs, **options):
    """A number that uses every output, and the log-sum-exp where a query sees something."""
    out, lse = attention(*inputs, **options, return_lse=True)
    weights = torch.arange(out.numel()).view(out.shape).sin()
    return (out * weights).sum() + torch.where(lse.isfinite(), lse.sin(), 0.0).sum()


def assert_equal_to_a_loop(loss, inputs, in_dims, differentiable=None):
    """loss of vmapped inputs: its values, its gradients per sample (vmap of grad) and
    their sum (grad of vmap)."""
    numbers = tuple(range(len(inputs) if differentiable is None else differentiable))
    values, gradients = [], []
    for n in range(N):
        sample = [
            x if dim is None else x.select(dim, n) for x, dim in zip(inputs, in_dims, strict=True)
        ]
        leaves = [
            x.detach().clone().requires_grad_() if i in numbers else x for i, x in enumerate(sample)
        ]
        values.append(loss(*leaves))
        gradients.append(torch.autograd.grad(values[-1], [leaves[i] for i in numbers]))
    mapped = vmap(loss, in_dims)
    torch.testing.assert_close(mapped(*inputs), torch.stack(values))

    per_sample = vmap(grad(loss, argnums=numbers), in_dims)(*inputs)
    for got, wanted in zip(per_sample, zip(*gradients, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted))

    totals = [
        torch.stack(each).sum(0) if in_dims[i] is None else torch.stack(each, in_dims[i])
        for i, each in zip(numbers, zip(*gradients, strict=True), strict=True)
    ]
    leaves = [
        x.detach().clone().requires_grad_() if i in numbers else x for i, x in enumerate(inputs)
    ]
    outer = torch.autograd.grad(mapped(*leaves).sum(), [leaves[i] for i in numbers])
    transformed = grad(lambda *given: mapped(*given).sum(), argnums=numbers)(*inputs)
    for got, also, wanted in zip(outer, transformed, totals, strict=True):
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(also, wanted)


def documents(rows):
    return masks.document(
        torch.arange(S).expand(rows, S) // torch.tensor([[5], [8]])[:rows], causal=True
    )


def shuffled(rows):
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    return documents(rows).select(order, order.flip(0))


def block_mask(*shape):
    chosen = torch.rand(*shape, 2, 2, generator=torch.Generator().manual_seed(3)) < 0.7
    return fk.block_mask(chosen, block_size=16, seqlen_q=S, seqlen_k=S, causal=True)


SHARED = {
    "window and softcap": lambda: {"window_size": (4, 0), "softcap": 1.5},
    "slopes of rows and heads": lambda: {"alibi_slopes": torch.rand(B, H)},
    "mask of each row": lambda: {"mask": documents(B)},
    "mask with key positions of each row": lambda: {"mask": shuffled(B).planned_for(BLOCKS)},
    "block mask of each row": lambda: {"mask": block_mask(B, H), "causal": True},
    "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 5},
}


@pytest.mark.parametrize("name", SHARED)
def test_options_that_the_samples_share(name):
    options = SHARED[name]()
    assert_equal_to_a_loop(
        lambda q, k, v: both(fk.flash_attn_func, q, k, v, **options), qkv(N), (0, 0, 0)
    )


@pytest.mark.parametrize("shape", [(1, H, S, S), (B, 1, 1, S)])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_bias_and_its_gradient(shape, mapped):
    bias = draw(*[N] * mapped, *shape)
    assert_equal_to_a_loop(
        lambda q, k, v, bias: both(fk.flash_attn_func, q, k, v, bias=bias, causal=True),
        (*qkv(N), bias),
        (0, 0, 0, 0 if mapped else None),
    )


def test_a_bias_of_samples_that_share_everything_else():
    assert_equal_to_a_loop(
        lambda q, k, v, bias: both(fk.flash_attn_func, q, k, v, bias=bias),
        (*qkv(), draw(1, H, S, N, S)),
        (None, None, None, 3),
    )


def test_the_vmapped_dimension_may_be_any_and_each_input_may_lack_it():
    def loss(q, k, v):
        return both(fk.flash_attn_func, q, k, v, causal=True)

    q, k, v = qkv(N)
    assert_equal_to_a_loop(loss, (q.movedim(0, 4), k[0], v[0]), (4, None, None))
    assert_equal_to_a_loop(loss, (q[0], k.movedim(0, 2), v.movedim(0, 1)), (None, 2, 1))


def test_packed_inputs():
    assert_equal_to_a_loop(
        lambda x, bias: both(fk.flash_attn_qkvpacked_func, x, causal=True, bias=bias),
        (draw(B, S, N, 3, H, D), draw(H, S, S)),
        (2, None),
    )
    assert_equal_to_a_loop(
        lambda q, kv: both(fk.flash_attn_kvpacked_func, q, kv, mask=documents(B)),
        (draw(N, B, S, H, D), draw(N, B, S, 2, K, D)),
        (0, 0),
    )


def test_packed_sequences():
    cu_seqlens = torch.tensor([0, 8, 13, 20], dtype=torch.int32)

    def loss(q, k, v):
        return both(fk.flash_attn_varlen_func, q, k, v, cu_seqlens_q=cu_seqlens,
                    cu_seqlens_k=cu_seqlens,
                    max_seqlen_q=8, max_seqlen_k=8, causal=True)  # fmt: skip

    assert_equal_to_a_loop(loss, [x[:, 0] for x in qkv(N)], (0, 0, 0))


def test_slopes_and_masks_that_vmap_maps():
    queries = torch.stack(
        [shuffled(B).queries, documents(B).queries, masks.full(S).queries.expand(5, B, S)]
    )
    keys = torch.stack([torch.randperm(S).int().expand(B, S) for _ in range(N)], 1)

    def loss(q, k, v, slopes, queries, keys):
        return both(
            fk.flash_attn_func, q, k, v, alibi_slopes=slopes, mask=masks.Mask(queries, keys, S)
        )

    assert_equal_to_a_loop(
        loss, (*qkv(N), torch.rand(9, H, N), queries, keys), (0, 0, 0, 2, 0, 1), differentiable=3
    )
    assert_equal_to_a_loop(
        loss, (*qkv(N), None, queries[0], keys), (0, 0, 0, None, None, 1), differentiable=3
    )


def test_block_masks_that_vmap_maps():
    patterns = torch.tensor(
        [[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 0], [1, 0]]], dtype=torch.bool
    )
    made = [
        fk.block_mask(pattern[None], block_size=16, seqlen_q=S, seqlen_k=S) for pattern in patterns
    ]
    lists = [torch.stack(each) for each in zip(*[mask[:4] for mask in made], strict=True)]

    def loss(q, k, v, *lists):
        return both(fk.flash_attn_func, q, k, v, mask=fk.BlockMask(*lists, *made[0][4:]))

    assert_equal_to_a_loop(loss, (*qkv(N), *lists), (0,) * 7, differentiable=3)


def test_plans_of_masks_that_vmap_maps():
    queries = torch.stack([shuffled(B).queries, documents(B).queries])
    keys = torch.randperm(S).int().expand(B, S)
    for given in (keys, None):
        mapped = vmap(lambda x, given=given: PLAN(x, given, S, list(BLOCKS)))(queries)
        for n in range(2):
            wanted = PLAN(queries[n], given, S, list(BLOCKS))
            assert all(
                torch.equal(one[n], other) for one, other in zip(mapped, wanted, strict=True)
            )


# Of torch's own attention under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_vmap_nests(implementation):
    q, k, v = qkv(N, 2)

    def attend(q, k, v):
        return fk.flash_attn_func(q, k, v, causal=True)

    with dispatch.force(implementation):
        nested = vmap(vmap(attend), in_dims=(0, None, 0))(q, k[0], v)
        wanted = [[attend(q[i, j], k[0, j], v[i, j]) for j in range(2)] for i in range(N)]
    torch.testing.assert_close(nested, torch.stack([torch.stack(row) for row in wanted]))


def test_gradients_nest():
    q, k, v = qkv(N, 2)

    def loss(q, k, v):
        return both(fk.flash_attn_func, q, k, v)

    nested = vmap(grad(lambda q, k, v: vmap(loss, (0, None, 0))(q, k, v).sum(), argnums=(0, 1, 2)))(
        q, k[:, 0], v
    )
    for n in range(N):
        leaves = [x.clone().requires_grad_() for x in (q[n], k[n, 0], v[n])]
        total = sum(loss(leaves[0][i], leaves[1], leaves[2][i]) for i in range(2))
        for got, wanted in zip(nested, torch.autograd.grad(total, leaves), strict=True):
            torch.testing.assert_close(got[n], wanted)


def test_jacobians_by_reverse_mode():
    q, k, v = (x[:1, :2] for x in qkv())

    def attend(q):
        return fk.flash_attn_func(q, k, v)

    wanted = torch.autograd.functional.jacobian(attend, q)
    torch.testing.assert_close(jacrev(attend)(q), wanted)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(attend, q, vectorize=True), wanted
    )


def test_dropout_without_a_seed_goes_by_the_randomness_of_vmap():
    q, k, v = qkv()

    def attend(x):
        return fk.flash_attn_func(x, k, v, dropout_p=0.5)

    same = vmap(attend, randomness="same")(q.expand(N, *q.shape))
    assert torch.equal(same[0], same[1])
    different = vmap(attend, randomness="different")(q.expand(N, *q.shape))
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(attend)(q.expand(N, *q.shape))


def test_torch_compile_of_per_sample_gradients():
    bias = draw(H, S, S)
    mask = documents(B).planned_for(BLOCKS)
    transformed = vmap(
        grad(
            lambda q, k, v, bias: both(fk.flash_attn_func, q, k, v, bias=bias, mask=mask),
            argnums=(0, 1, 2, 3),
        ),
        (0, 0, 0, None),
    )
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv(N), bias), transformed(*qkv(N), bias))


def test_a_second_derivative_is_refused():
    q, k, v = qkv()

    def slope(q):
        return grad(lambda q: fk.flash_attn_func(q, k, v).square().sum())(q).sum()

    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        grad(slope)(q)
