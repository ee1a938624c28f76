"""The flash-attn packages where they are installed: flash_attn (FlashAttention-2), flash_attn_interface (3) and
flash_attn.cute (flash-attn-4).

B batch, S sequence, T packed tokens, H heads, D head dimension.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.peers.base import Attend, Peer, first
from flashtrain_recipes.attention_benchmark.peers.pytorch import PACKED_KINDS
from flashtrain_recipes.benchmark_runner.measuring import first_line

_BY_ARGUMENT = ("full", "causal", "window")


class FlashAttn(Peer):
    """flash_attn.flash_attn_func, flash_attn_varlen_func for documents, and flash_attn_with_kvcache."""

    name, title = "flash-attn", "flash-attn"
    module, table = "flash_attn", "block_table"
    extras: tuple[str, ...] = ("deterministic", "pages")

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            self._import()
        except Exception as error:  # noqa: BLE001 - built for another torch, for one: such imports raise anything
            return f"cannot be imported ({first_line(error)})"
        return None

    def refuses(self, case: Case) -> str | None:
        if case.kind not in (*_BY_ARGUMENT, *PACKED_KINDS):
            return "no such mask"
        if case.dtype == torch.float32:
            return "no float32"
        if case.bias:
            return "no bias"
        return "no softcap with dropout" if case.softcap and case.dropout else super().refuses(case)

    def options(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        """The keyword arguments of a call, without those that have their defaults."""
        found: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.mask_name.causal}
        if case.kind == "window":
            found["window_size"] = (case.mask_name.left, case.mask_name.right)
        if case.dropout:
            found["dropout_p"] = case.dropout
        if case.softcap:
            found["softcap"] = case.softcap
        if inputs.slopes is not None:
            found["alibi_slopes"] = inputs.slopes
        if inputs.sink is not None:
            found["learnable_sink"] = inputs.sink
        if case.deterministic:
            found["deterministic"] = True
        return found

    def attend(self, case: Case, context: Context) -> Attend:
        module = self._import()
        if case.page is not None:
            return self._cached(module, case, context)
        if case.kind in PACKED_KINDS:
            return self._packed(module.flash_attn_varlen_func, case, context)

        def attention(inputs: Inputs) -> Tensor:
            return first(module.flash_attn_func(inputs.q, inputs.k, inputs.v, **self.options(case, inputs)))

        return attention

    def _cached(self, module: ModuleType, case: Case, context: Context) -> Attend:
        def attention(inputs: Inputs) -> Tensor:
            k, v, table = inputs.pages if case.page else (inputs.k, inputs.v, None)
            where = {"cache_seqlens": context.filled, self.table: table}
            return first(module.flash_attn_with_kvcache(inputs.q, k, v, softmax_scale=case.scale, **where))

        return attention

    def _packed(self, function: Callable[..., Any], case: Case, context: Context) -> Attend:
        bounds, longest = context.cu_seqlens, context.longest
        where: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        taken = inspect.signature(function).parameters  # not every version of flash-attn-4 asks for the lengths
        where |= {name: longest for name in ("max_seqlen_q", "max_seqlen_k") if name in taken}

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
            return first(function(q, k, v, **where, **self.options(case, inputs))).view_as(inputs.q)

        return attention

    def _import(self) -> ModuleType:
        """The package's module. A flash-attn-4 alone also answers to `import flash_attn`: the functions decide."""
        found = importlib.import_module(self.module)
        if not hasattr(found, "flash_attn_func"):
            raise ImportError(f"{self.module} has no flash_attn_func")
        return found


class FlashAttn3(FlashAttn):
    """flash_attn_interface: the functions for Hopper GPUs, with fewer features."""

    name, title = "flash-attn-3", "flash-attn-3"
    module, table = "flash_attn_interface", "page_table"

    def refuses(self, case: Case) -> str | None:
        return "no dropout or ALiBi" if case.dropout or case.alibi else super().refuses(case)


class FlashAttn4(FlashAttn3):
    """flash_attn.cute: the same functions written in CuTe DSL. It decodes by those for training."""

    name, title = "flash-attn-4", "flash-attn-4"
    module = "flash_attn.cute"
    extras = ("sinks", "deterministic", "pages")

    def _cached(self, module: ModuleType, case: Case, context: Context) -> Attend:
        def attention(inputs: Inputs) -> Tensor:
            if not case.page:
                return first(module.flash_attn_func(inputs.q, inputs.k, inputs.v, softmax_scale=case.scale))
            k, v, table = inputs.pages
            where = {"page_table": table, "seqused_k": context.filled}
            return first(module.flash_attn_varlen_func(inputs.q, k, v, softmax_scale=case.scale, **where))

        return attention
