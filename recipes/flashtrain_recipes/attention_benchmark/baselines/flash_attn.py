"""Baselines with flash-attn's functions: the packages of FlashAttention-2, 3 and 4.

B batch, S sequence, T packed tokens, H heads, D head dimension.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from flashtrain.errors import first_line
from flashtrain_recipes.attention_benchmark.baselines.base import Attend, AttentionBaseline, first
from flashtrain_recipes.attention_benchmark.cases import BY_ARGUMENT, Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.settings import PACKED


class FlashAttnFunctions(AttentionBaseline):
    """Base of packages that have flash-attn's functions.

    flash_attn_varlen_func computes the masks in `packed`, flash_attn_with_kvcache decodes,
    flash_attn_func the rest.
    """

    module: str
    packed: tuple[str, ...] = PACKED
    table = "block_table"  # the argument that says where a cache's pages are
    supports: tuple[str, ...] = ("softcap", "dropout", "ALiBi", "deterministic", "pages")

    def imported(self) -> Any:
        """Import and return the package. Raises ImportError where it lacks
        flash-attn's functions."""
        # flash-attn-4 alone also answers to `import flash_attn`.
        found = importlib.import_module(self.module)
        if not hasattr(found, "flash_attn_func"):
            raise ImportError(
                f"{self.module} has no flash_attn_func: expected a version with flash-attn's "
                "functions"
            )
        return found

    def mask_options(self, case: Case, context: Context) -> dict[str, Any]:
        """Return the keyword arguments for masks that `options` does not describe; {} unless a
        subclass supports such masks."""
        return {}

    def options(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        """Return the keyword arguments of a flash-attn call for the case; arguments at their
        defaults are left out."""
        given = {
            "window_size": (case.mask_name.left, case.mask_name.right)
            if case.kind == "window"
            else None,
            "dropout_p": case.dropout or None,
            "softcap": case.softcap or None,
            "alibi_slopes": inputs.slopes,
            "bias": inputs.bias,
            "learnable_sink": inputs.sink,
            "deterministic": "deterministic" in case.features or None,
        }
        common = {"softmax_scale": case.scale, "causal": case.mask_name.causal}
        return common | {name: value for name, value in given.items() if value is not None}

    def attend(self, case: Case, context: Context) -> Attend:
        module = self.imported()
        if case.page is not None:
            return self.cached(module, case, context)
        mask = self.mask_options(case, context)
        if case.kind not in self.packed:
            function = module.flash_attn_func
            return lambda one: first(
                function(one.q, one.k, one.v, **{**self.options(case, one), **mask})
            )
        packed = module.flash_attn_varlen_func
        bounds = context.cu_seqlens
        longest = max(case.documents)
        where: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, **mask}
        # Not every version of flash-attn-4 takes the lengths.
        taken = inspect.signature(packed).parameters
        where |= {name: longest for name in ("max_seqlen_q", "max_seqlen_k") if name in taken}

        def attention(one: Inputs) -> Tensor:
            q, k, v = (x.flatten(0, 1) for x in (one.q, one.k, one.v))
            return first(packed(q, k, v, **{**self.options(case, one), **where})).view_as(one.dout)

        return attention

    def cached(self, module: Any, case: Case, context: Context) -> Attend:
        """Return the function of `attend` for decoding: it attends to the keys and
        values of a (paged) cache."""

        def attention(one: Inputs) -> Tensor:
            k, v, table = one.pages if case.page else (one.k, one.v, None)
            where = {"cache_seqlens": context.filled, self.table: table}
            return first(
                module.flash_attn_with_kvcache(one.q, k, v, softmax_scale=case.scale, **where)
            )

        return attention


class FlashAttn(FlashAttnFunctions):
    """FlashAttention-2, the package flash_attn."""

    name = title = "flash-attn"
    module = "flash_attn"

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            self.imported()
        except Exception as error:  # noqa: BLE001 - built for another torch, for one: such imports raise anything
            return f"cannot be imported ({first_line(error)})"
        return None

    def refuses(self, case: Case) -> str | None:
        if case.kind not in (*BY_ARGUMENT, *PACKED):
            return "no such mask"
        return "no float32" if case.dtype == torch.float32 else super().refuses(case)


class FlashAttn3(FlashAttn):
    """FlashAttention-3 for Hopper GPUs, the package flash_attn_interface. It
    supports fewer features."""

    name = title = "flash-attn-3"
    module, table = "flash_attn_interface", "page_table"
    supports: tuple[str, ...] = ("softcap", "deterministic", "pages")


class FlashAttn4(FlashAttn3):
    """FlashAttention-4, written in the CuTe DSL, the package flash_attn.cute. It decodes by
    the training functions."""

    name = title = "flash-attn-4"
    module = "flash_attn.cute"
    supports = ("softcap", "sinks", "deterministic", "pages")

    def cached(self, module: Any, case: Case, context: Context) -> Attend:
        def attention(one: Inputs) -> Tensor:
            if not case.page:
                return first(module.flash_attn_func(one.q, one.k, one.v, softmax_scale=case.scale))
            k, v, table = one.pages
            where = {"page_table": table, "seqused_k": context.filled}
            return first(
                module.flash_attn_varlen_func(one.q, k, v, softmax_scale=case.scale, **where)
            )

        return attention
