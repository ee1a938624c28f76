"""The zigzag ring of ring-flash-attn 0.1.8, which calls flash-attn 2, on flash-attn-4's kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context.traffic import GRADIENT_BYTES, Traffic
from flashtrain.errors import first_line
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase

PACKAGE, KERNELS = "ring_flash_attn", "flash_attn.flash_attn_interface"


class RingFlashAttn(ContextBaseline):
    """ring_flash_attn.zigzag_ring_flash_attn_func."""

    separable = False

    def missing(self, device: torch.device) -> str | None:
        try:
            _zigzag()
        except Exception as error:  # noqa: BLE001 - such imports raise anything
            return f"needs ring-flash-attn and flash-attn-4 ({first_line(error)})"
        return None

    def refuses(self, case: ContextCase) -> str | None:
        # Its gradients of float32 tensors share memory with its buffers.
        fits = case.attention.mask == "causal" and case.attention.dtype_name != "float32"
        return None if fits else "a causal mask and 16 bits are expected"

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        ring, given = _zigzag(), {"softmax_scale": place.case.attention.scale, "causal": True}
        sent = 2 * (place.team.size - 1) * k.numel() * k.element_size()
        returned = 2 * place.team.size * k.numel() * GRADIENT_BYTES
        return Attention(lambda q, k, v: ring(q, k, v, **given), Traffic(sent, sent + returned))


@cache
def _zigzag() -> Callable[..., Tensor]:
    """Import the file of the zigzag ring without its package's __init__, which needs an older
    transformers, and with a stand-in for flash-attn 2."""
    kernels: Any = importlib.import_module("flash_attn.cute.interface")

    def forward(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **_: Any
    ) -> Any:
        out, lse, *_rest = kernels._flash_attn_fwd(
            q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True
        )
        return out, lse, None, None

    def backward(softmax_lse: Any, softmax_scale: Any, causal: Any, **given: Any) -> None:
        names = "q", "k", "v", "out", "dout", "dq", "dk", "dv"
        own = {name: given[name] for name in names}
        kernels._flash_attn_bwd(lse=softmax_lse, softmax_scale=softmax_scale, causal=causal, **own)

    stand_in, package = ModuleType(KERNELS), ModuleType(PACKAGE)
    vars(stand_in).update(_flash_attn_forward=forward, _flash_attn_backward=backward)
    spec = find_spec(PACKAGE)
    package.__path__ = list((spec and spec.submodule_search_locations) or ())
    sys.modules.update({KERNELS: stand_in, PACKAGE: package})
    return importlib.import_module(f"{PACKAGE}.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func


BASELINES = (RingFlashAttn("ring-flash-attn", "ring-flash-attn", "zigzag"),)
