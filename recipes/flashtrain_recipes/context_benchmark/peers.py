"""Other ways to share attention, each in its own layout: plain all-gather, torch's own, ring-flash-attention.

B batch (1), S sequence, n tokens a rank holds, R ranks, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.exchange import take
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Part, Scores, local_part, planned
from flashtrain.distributed.context.ways import Traffic
from flashtrain_recipes.attention_benchmark.inputs import starts
from flashtrain_recipes.context_benchmark.contenders import Attend, Contender, ContextCase, Place, evenly_dealt

# torch 2.13 renamed both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class PlainAllGather(Contender):
    """All keys and values gathered at once, one call of our kernel, gradients summed by one reduce-scatter in the
    inputs' dtype; nothing overlaps."""

    separable = True

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attend:
        layout, team, one = place.layout(self.layout), place.team, place.case.attention
        part = planned(local_part(place.mask, layout.tokens[:, team.rank], None), one.head_dim, one.dtype)
        gathered = _Gathered(layout, team.group.group, part, Scores(one.scale), team.device)
        return lambda q, k, v: _Plain.apply(q, k, v, gathered)

    def traffic(self, place: Place) -> Traffic:
        one, held = place.case.attention, place.layout(self.layout).held
        sent = (place.case.degree - 1) * held * 2 * one.kv_heads * one.head_dim * one.dtype.itemsize
        return Traffic(sent, 2 * sent)


class _Gathered:
    """One mask and layout for PlainAllGather. part: what this rank's queries see of all keys in their order."""

    def __init__(self, layout: Layout, group: Any, part: Part, scores: Scores, device: torch.device) -> None:
        self.group, self.part, self.scores = group, part, scores
        self.places = layout.places.to(device)
        self.tokens = layout.tokens.flatten(1).to(device)
        self.degree = layout.degree

    def whole(self, x: Tensor) -> Tensor:
        """(B, n, K, D) of every rank -> (B, S, K, D), in order."""
        gathered = x.new_empty((self.degree * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=self.group)
        return take(gathered.unflatten(0, (self.degree, -1)).movedim(0, 1).flatten(1, 2), self.places)

    def own(self, x: Tensor) -> Tensor:
        """The sum over the ranks of x (B, S, K, D) -> this rank's part (B, n, K, D)."""
        dealt = take(x, self.tokens.clamp(min=0)).masked_fill((self.tokens < 0)[..., None, None], 0)
        sent = dealt.unflatten(1, (self.degree, -1)).movedim(1, 0).flatten(0, 1).contiguous()
        received = sent.new_empty((sent.shape[0] // self.degree, *sent.shape[1:]))
        _reduce_scatter(received, sent, group=self.group)
        return received


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gathered: _Gathered) -> Tensor:
        out, lse = local_attention.forward(q, gathered.whole(k), gathered.whole(v), gathered.part, gathered.scores)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gathered = gathered
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        gathered: _Gathered = ctx.gathered
        keys, values = gathered.whole(k), gathered.whole(v)
        dq, dk, dv = local_attention.backward(dout, q, keys, values, out, lse, gathered.part, gathered.scores)
        return dq, gathered.own(dk.to(k.dtype)), gathered.own(dv.to(v.dtype)), None


@dataclass(frozen=True)
class TorchContextParallel(Contender):
    """torch.distributed.tensor.experimental.context_parallel around SDPA, with one of SDPA's backends.

    It deals head-tail where it is causal, and contiguous runs where it is not.
    """

    backend: str = "FLASH_ATTENTION"

    def missing(self, device_type: str) -> str | None:
        if device_type != "cuda":
            return "needs NVIDIA GPUs"
        try:
            importlib.import_module("torch.distributed.tensor.experimental").context_parallel  # noqa: B018
        except (ImportError, AttributeError) as error:
            return f"cannot be imported ({error})"
        return None

    def applies(self, case: ContextCase) -> bool:
        return (self.layout == "contiguous") == (case.attention.kind == "full")

    def refuses(self, case: ContextCase) -> str | None:
        return evenly_dealt(case) if case.attention.kind in ("full", "causal") else "no such mask"

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attend:
        one = place.case.attention
        options: dict[str, Any] = {"is_causal": one.kind == "causal", "scale": one.scale}
        if one.heads != one.kv_heads:
            options["enable_gqa"] = True

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(getattr(SDPBackend, self.backend)):
                out = F.scaled_dot_product_attention(q, k, v, **options)
            return out.transpose(1, 2)

        return attention

    @contextlib.contextmanager
    def within(self, place: Place) -> Iterator[None]:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel

        team = place.team
        group: Any = team.group.group
        mesh = DeviceMesh.from_group(group, team.device.type)
        # It deals what it is given in place. Ours are dealt already: it gets a tensor that nobody needs, of a length
        # from which it sees whether chunks come in pairs (head-tail) or not.
        length = 2 * team.size if place.case.attention.kind == "causal" else team.size
        with context_parallel(mesh, buffers=[torch.zeros(length, device=team.device)], buffer_seq_dims=[0]):
            yield


@dataclass(frozen=True)
class RingFlashAttention(Contender):
    """The package ring-flash-attn: zigzag ring for causal, plain ring for full, its Llama 3 form for documents."""

    def missing(self, device_type: str) -> str | None:
        if device_type != "cuda":
            return "needs NVIDIA GPUs"
        try:
            importlib.import_module("ring_flash_attn")
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            return f"cannot be imported ({str(error).splitlines()[0]})"
        return None

    def applies(self, case: ContextCase) -> bool:
        known = any(case.attention.kind in kinds for kinds in _RING_KINDS.values())
        return case.attention.kind in _RING_KINDS[self.way] if known else self.way == _ZIGZAG

    def refuses(self, case: ContextCase) -> str | None:
        if case.attention.kind not in _RING_KINDS[self.way]:
            return "no such mask"
        if case.attention.dtype == torch.float32:
            return "no float32"
        return evenly_dealt(case)

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attend:
        module = importlib.import_module("ring_flash_attn")
        one, team = place.case.attention, place.team
        options: dict[str, Any] = {"softmax_scale": one.scale, "group": team.group.group}
        options["causal"] = one.mask_name.causal
        if one.kind == "causal":
            return partial(module.zigzag_ring_flash_attn_func, **options)
        if one.kind == "full":
            return partial(module.ring_flash_attn_func, **options)
        bounds = starts(one.documents, team.device)
        queries, keys, longest_q, longest_k, slice_k = module.llama3_flash_attn_prepare_cu_seqlens(
            bounds, causal=one.mask_name.causal, rank=team.rank, world_size=team.size
        )

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = module.llama3_flash_attn_varlen_func(
                q[0], k[0], v[0], queries, keys, longest_q, longest_k, heads_k_stride=1, local_k_slice=slice_k,
                **options,
            )  # fmt: skip
            return out[None]

        return attention


_ZIGZAG, _RING, _LLAMA3 = (f"ring-flash-attention {form}" for form in ("zigzag", "ring", "Llama 3"))
_RING_KINDS: dict[str, Sequence[str]] = {
    _ZIGZAG: ("causal",),
    _RING: ("full",),
    _LLAMA3: ("document", "causal-document"),
}


def peers() -> list[Contender]:
    """One of each, in the order of settings.CONTEXT_IMPLEMENTATIONS."""
    found: list[Contender] = [PlainAllGather("plain-all-gather", "plain all-gather", "head-tail")]
    for name, words, backend in (
        ("torch-flash", "torch context_parallel, FlashAttention-2", "FLASH_ATTENTION"),
        ("torch-cudnn", "torch context_parallel, cuDNN", "CUDNN_ATTENTION"),
    ):
        found += [TorchContextParallel(name, words, layout, backend) for layout in ("head-tail", "contiguous")]
    found += [
        RingFlashAttention("ring-flash-attention", _ZIGZAG, "head-tail"),
        RingFlashAttention("ring-flash-attention", _RING, "contiguous"),
        RingFlashAttention("ring-flash-attention", _LLAMA3, "contiguous"),
    ]
    return found
