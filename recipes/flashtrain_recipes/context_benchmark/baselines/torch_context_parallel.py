"""PyTorch's own context parallelism: its prototype context_parallel around
scaled_dot_product_attention by cuDNN, a zigzag ring.

B batch (1), n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.distributed.context.traffic import Traffic
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase


class TorchContextParallel(ContextBaseline):
    """torch.distributed.tensor.experimental.context_parallel."""

    separable = False

    def refuses(self, case: ContextCase) -> str | None:
        one = case.attention
        if one.mask != "causal" or one.kv_heads != one.heads:
            return "a causal mask and as many key/value heads as query heads are expected"
        return None

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        _entered(place.team.size, q.device.type)
        one = place.case.attention

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = functional.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    is_causal=True,
                    scale=one.scale,
                )
            return out.transpose(1, 2)

        sent = 2 * (place.team.size - 1) * k.numel() * k.element_size()
        return Attention(call, Traffic(sent, 2 * sent))


@cache
def _entered(size: int, kind: str) -> object:
    """Replace scaled_dot_product_attention for the rest of this rank's life, since
    its backward pass too must run inside of the block."""
    mesh = init_device_mesh(kind, (size,))
    buffer = torch.zeros(2 * size, device=kind)  # sharded at once, as the block's inputs are
    block = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
    block.__enter__()
    return block


BASELINES = (TorchContextParallel("torch", "torch context_parallel", "zigzag"),)
