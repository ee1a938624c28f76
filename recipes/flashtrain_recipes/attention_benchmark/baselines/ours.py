"""flashtrain_kernels as baselines, called as a user's program calls it: by flash-attn's functions.

B batch, S sequence, T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashtrain_kernels import block_sparse, dispatch, masks
from flashtrain_kernels.backends.hopper import backend as hopper
from flashtrain_recipes.attention_benchmark.baselines.base import Attend
from flashtrain_recipes.attention_benchmark.baselines.flash_attn import FlashAttnFunctions
from flashtrain_recipes.attention_benchmark.baselines.pytorch import fresh_compile
from flashtrain_recipes.attention_benchmark.cases import BLOCK_SIZE, BY_ARGUMENT, Case
from flashtrain_recipes.attention_benchmark.inputs import (
    Context,
    Inputs,
    global_sizes,
    prefix_length,
    segment_ids,
    segment_lengths,
    starts,
    zigzag,
)


class Flashtrain(FlashAttnFunctions):
    """The kernels that flashtrain chooses on this device, with masks that flash-attn's arguments
    do not describe made once for each batch."""

    name = title = "flashtrain"
    module, packed = "flashtrain_kernels", ("varlen", "causal-varlen")
    supports = (
        "softcap",
        "dropout",
        "ALiBi",
        "sinks",
        "deterministic",
        "bias",
        "bias gradient",
        "pages",
    )

    def mask_options(self, case: Case, context: Context) -> dict[str, Any]:
        make = self.plan(case, context)
        return {} if make is None else {"mask": make(), "causal": False}

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        if case.kind in (*BY_ARGUMENT, *self.packed):
            return None
        if case.is_block_sparse:
            q, k = case.seqlen_q, case.seqlen_k
            return partial(
                block_sparse.block_mask,
                context.table,
                block_size=BLOCK_SIZE,
                seqlen_q=q,
                seqlen_k=k,
            )
        make = mask_maker(case, context.device)
        return lambda: make().planned(case.head_dim, case.dtype)


class FlashtrainPlanned(Flashtrain):
    """flashtrain on packed documents, with one mask that all layers share, instead of
    each layer making its own."""

    name, title = "flashtrain-planned", "flashtrain, planned once"

    def applies(self, case: Case) -> bool:
        return case.kind in self.packed

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        bounds, total = context.cu_seqlens, case.batch * case.seqlen_q
        make = partial(masks.varlen, bounds, bounds, total, total, causal=case.mask_name.causal)
        return lambda: make().planned(case.head_dim, case.dtype)


class FlashtrainCompiled(Flashtrain):
    """flashtrain's functions under torch.compile, compiled for each case's exact shape."""

    name, title = "flashtrain-compiled", "flashtrain, compiled"

    def missing(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "measured on GPUs only"

    def applies(self, case: Case) -> bool:
        return case.compiled

    def attend(self, case: Case, context: Context) -> Attend:
        attention = super().attend(case, context)
        # a function of tensors, as in a model, so that no guard looks at what the benchmark
        # does around the call
        compiled = fresh_compile(lambda q, k, v: attention(Inputs(q, k, v, q)))
        return lambda inputs: compiled(inputs.q, inputs.k, inputs.v)


class FlashtrainPortable(Flashtrain):
    """flashtrain's functions on the portable kernels, on GPUs that would otherwise
    use the Hopper kernels."""

    name, title = "flashtrain-portable", "flashtrain, portable"

    def missing(self, device: torch.device) -> str | None:
        planned = device.type == "cuda" and not torch.cuda.is_available()  # for another machine
        reason = None if planned else hopper.unavailable(device)
        return None if reason is None else f"the same as flashtrain here: {reason}"

    def within(self) -> contextlib.AbstractContextManager[None]:
        return dispatch.force("portable")


def mask_maker(case: Case, device: torch.device) -> Callable[[], Any]:
    """Return a function that makes a case's mask, without the plan that kernels need
    (Mask.planned); block masks are not supported.

    Tensors that a real batch already has on its device are made here once, and are not timed.
    """
    seqlen = case.seqlen_k
    if case.kind in BY_ARGUMENT:
        return partial(
            masks.sliding_window, seqlen, (case.mask_name.left, case.mask_name.right), device=device
        )
    if case.kind == "prefix-lm":
        return partial(
            masks.prefix_lm, torch.tensor([prefix_length(seqlen)], device=device), seqlen=seqlen
        )
    if case.kind == "global-window":
        tokens, window = global_sizes(seqlen)
        return partial(masks.global_window, seqlen, tokens, (window, window), device=device)
    if case.kind == "tile":
        frames, references = case.mask_name.frames, case.mask_name.references
        return partial(masks.attention_tile, frames, seqlen // frames, references, device=device)
    lengths = segment_lengths(case)
    if case.kind == "shared-question":
        return partial(masks.shared_question, segment_ids(lengths, device)[None])
    bounds, causal = starts(lengths, device), case.mask_name.causal

    def document() -> Any:
        return masks.document(masks.documents_from_cu_seqlens(bounds, seqlen), causal=causal)

    if case.kind != "causal-document-zigzag":
        return document
    order = zigzag(seqlen, device)
    return lambda: document().select(order, order)
