"""What the tests on a GPU share: torch's own attention to compare errors with, allocations with
guards around them, and the keep mask that the kernels really used.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from attention_cases import Case, expected, ours, run
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtrain_kernels import eager, flash_attn_func, philox, reference
from flashtrain_kernels.masks import Mask
from flashtrain_kernels.options import Options, band, seed_tensor

DEVICE = "cuda"
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def error(got: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> float:
    return (got[name].double() - wanted[name].double()).abs().max().item()


def assert_same(got: Tensor, wanted: Tensor, *, added: bool = False) -> None:
    """Equal bit for bit; or, of numbers that the Hopper backward `added` up in any order
    (dQ), but for one rounding."""
    if not added:
        assert torch.equal(got, wanted)
        return
    bound = torch.finfo(got.dtype).eps * wanted.float().abs() + 1e-4 * wanted.float().abs().max()
    assert ((got.float() - wanted.float()).abs() <= bound).all()


def assert_as_exact_as_torch(case: Case, dtype: torch.dtype) -> None:
    """Outputs and gradients: at most twice torch's error against float64, and one rounding of the
    largest value more (of 0.01 where all are smaller: with one key, dQ is exactly 0). The
    log-sum-exp: within 1e-4."""
    inputs = case.inputs(dtype, DEVICE)
    wanted = expected(case, inputs, through_lse=False)
    got = ours(case, inputs, through_lse=False)
    theirs = run(torch_attention, inputs, case.options(DEVICE), through_lse=False)
    torch.testing.assert_close(got.pop("lse").double(), wanted.pop("lse"), atol=1e-4, rtol=0)
    for name, value in wanted.items():
        bound = 2 * error(theirs, wanted, name) + torch.finfo(dtype).eps * max(
            value.abs().max().item(), 0.01
        )
        assert error(got, wanted, name) <= bound, name


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same call by torch in the inputs' dtype: scaled_dot_product_attention with a dense mask,
    and for softcap and dropout the formula as one writes it by hand. The log-sum-exp it returns is
    zeros: torch gives none."""
    batch, seqlen_q, heads, head_dim = q.shape
    left, right = (
        (None, None) if isinstance(mask, Mask) else band(seqlen_q, k.shape[1], causal, window_size)
    )
    options = Options(
        head_dim**-0.5, left, right, alibi_slopes=alibi_slopes, dropout_p=dropout_p, mask=mask,
        seed=seed_tensor(dropout_seed, q.device) if dropout_p else None,
    )  # fmt: skip
    seen = reference.visible_mask(seqlen_q, k.shape[1], options, q.device).expand(
        -1, -1, seqlen_q, k.shape[1]
    )
    nothing = ~seen.any(-1, keepdim=True)
    added = bias
    if alibi_slopes is not None:
        slopes = reference.alibi(batch, seqlen_q, k.shape[1], options, torch.float32)
        added = slopes if bias is None else slopes + bias
    # A row of -inf alone would be NaN: it sees everything, and is taken out again.
    dense = seen | nothing if added is None else torch.where(seen | nothing, added, -torch.inf)
    queries = q.transpose(1, 2)
    keys, values = (x.transpose(1, 2).repeat_interleave(heads // k.shape[2], 1) for x in (k, v))
    if softcap or dropout_p:
        kept = reference.dropout_mask(
            q.shape, k.shape, options, q.device
        ) / philox.keep_probability(dropout_p)
        out = _by_hand(queries, keys, values, dense, softcap, kept.to(q.dtype))
    else:
        # torch's fused kernel takes no mask of another dtype, and not every one
        # that wants a gradient.
        exact = added is not None and (added.requires_grad or added.dtype != q.dtype)
        with sdpa_kernel(
            [SDPBackend.MATH] if exact else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=dense)
    out = out.masked_fill(nothing, 0.0)
    return out.transpose(1, 2), torch.zeros(batch, heads, seqlen_q, device=q.device)


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, dense: Tensor, softcap: float, kept: Tensor
) -> Tensor:
    """As models write it: products in the inputs' dtype, softmax in float32."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense, -torch.inf) if dense.dtype == torch.bool else scores + dense
    return (torch.softmax(scores.float(), -1).to(q.dtype) * kept) @ v


class Guarded(NamedTuple):
    """An allocation amid guards. inside: what was given out, full of `unwritten` at first."""

    buffer: Tensor
    inside: Tensor
    unwritten: float


_GUARD = 4096
_BORDER = 77


@contextlib.contextmanager
def guarded_allocations() -> Iterator[list[Guarded]]:
    """Within it torch.empty and Tensor.new_empty give a tensor between 4096 elements that
    must stay as they are."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    eager._KNOWN.clear()  # a replay allocates its workspaces in one
    made: list[Guarded] = []

    def allocate(size: tuple, dtype: torch.dtype | None, device: Any) -> Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], (tuple, list)) else size)
        buffer = empty(shape.numel() + 2 * _GUARD, dtype=dtype, device=device).fill_(_BORDER)
        inside = buffer[_GUARD : _GUARD + shape.numel()].view(shape)
        unwritten = torch.nan if buffer.is_floating_point() else -123456789
        made.append(Guarded(buffer, inside.fill_(unwritten), unwritten))
        return inside

    def guarded_empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return allocate(size, dtype, device)

    def guarded_new_empty(
        self: Tensor, *size: Any, dtype: torch.dtype | None = None, device: Any = None
    ) -> Tensor:
        return allocate(size, dtype or self.dtype, device or self.device)

    torch.empty, torch.Tensor.new_empty = guarded_empty, guarded_new_empty
    try:
        yield made
    finally:
        torch.empty, torch.Tensor.new_empty = empty, new_empty
        eager._KNOWN.clear()


def assert_written_within_the_guards(made: list[Guarded]) -> None:
    for buffer, inside, unwritten in made:
        assert buffer[:_GUARD].eq(_BORDER).all()
        assert buffer[_GUARD + inside.numel() :].eq(_BORDER).all()
        left = inside.isnan() if buffer.is_floating_point() else inside.eq(int(unwritten))
        assert not left.any(), (
            f"{int(left.sum())} elements of {tuple(inside.shape)} were not written"
        )


def weights_seen(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor
) -> Tensor:
    """(B, H, Sq, Sk): the attention weights that `attend` really used, by giving it values
    that pick one key each.

    q (B, Sq, H, D), k (B, Sk, K, D); D keys a call.
    """
    _, seqlen_k, _, head_dim = k.shape
    parts = []
    for first in range(0, seqlen_k, head_dim):
        count = min(head_dim, seqlen_k - first)
        v = torch.zeros_like(k)
        v[:, first : first + count, :, :count] = torch.eye(count, dtype=k.dtype, device=k.device)[
            :, None
        ]
        parts.append(attend(q, k, v)[..., :count])
    return torch.cat(parts, -1).transpose(1, 2)


def even_weights(batch: int, seqlen_q: int, seqlen_k: int, heads: int, **options: Any) -> Tensor:
    """`weights_seen` where all scores are 0, so that a query's visible keys share evenly: positive
    where visible and kept by dropout."""
    q, k = (
        torch.zeros(batch, n, heads, 64, device=DEVICE, dtype=torch.float16)
        for n in (seqlen_q, seqlen_k)
    )
    return weights_seen(lambda *qkv: flash_attn_func(*qkv, **options), q, k)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of step(), and its outputs. step runs before, so that nothing is
    compiled during the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs
