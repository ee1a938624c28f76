"""torch.distributed.tensor.experimental.context_parallel around SDPA: causal, head-tail."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase


@dataclass(frozen=True)
class TorchContextParallel(ContextBaseline):
    """backend: the only one of SDPA's that is taken."""

    backend: str = "FLASH_ATTENTION"

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs NVIDIA GPUs"
        try:
            importlib.import_module("torch.distributed.tensor.experimental").context_parallel  # noqa: B018
        except (ImportError, AttributeError) as error:
            return f"cannot be imported ({error})"
        return None

    def refuses(self, case: ContextCase) -> str | None:
        length, chunks = case.attention.seqlen_q, 2 * case.degree
        if case.attention.kind != "causal":
            return "no such mask"
        return f"{length} tokens are no multiple of {chunks}" if length % chunks else None

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        one = place.case.attention
        options: dict[str, Any] = {"is_causal": True, "scale": one.scale}
        if one.heads != one.kv_heads:
            options["enable_gqa"] = True

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(getattr(SDPBackend, self.backend)):
                out = F.scaled_dot_product_attention(q, k, v, **options)
            return out.transpose(1, 2)

        return Attention(attention)

    @contextmanager
    def computing(self, place: Place) -> Iterator[None]:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel

        team = place.team
        group: Any = team.group.group
        mesh = DeviceMesh.from_group(group, team.device.type)
        # It shards what it is given in place. Ours are sharded already: it gets a tensor that nobody needs.
        unused = torch.zeros(2 * team.size, device=team.device)
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]):
            yield


BASELINES = (
    TorchContextParallel("torch-flash", "torch context_parallel, FlashAttention-2", "head-tail"),
    TorchContextParallel("torch-cudnn", "torch context_parallel, cuDNN", "head-tail", "CUDNN_ATTENTION"),
)
