"""flashtrain_kernels, as any program calls it.

B batch, S sequence, T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashtrain_kernels
from flashtrain_kernels import block_sparse, dispatch, masks
from flashtrain_kernels.backends.hopper import backend as hopper
from flashtrain_recipes.attention_benchmark.cases import BLOCK_SIZE, Case
from flashtrain_recipes.attention_benchmark.inputs import (
    BLOCK_CAUSAL,
    Context,
    Inputs,
    global_sizes,
    numbers,
    prefix_length,
    segment_lengths,
    starts,
)
from flashtrain_recipes.attention_benchmark.peers.base import Attend, Peer, first
from flashtrain_recipes.attention_benchmark.peers.pytorch import fresh_compile

# Masks that are arguments of the call; the others are made once a batch and given as mask=.
_BY_ARGUMENT = ("full", "causal", "window")


class Flashtrain(Peer):
    """flash_attn_func, flash_attn_varlen_func for the varlen masks, or flash_attn_with_kvcache."""

    name, title = "flashtrain", "flashtrain"
    extras = ("sinks", "deterministic", "pages")

    def attend(self, case: Case, context: Context) -> Attend:
        if case.page is not None:
            return _cached(case, context)
        if case.is_varlen:
            return _varlen(case, context, None)
        mask = make_mask(case, context)

        def attention(inputs: Inputs) -> Tensor:
            given = options(case, inputs, mask)
            return first(flashtrain_kernels.flash_attn_func(inputs.q, inputs.k, inputs.v, **given))

        return attention

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        if case.kind in _BY_ARGUMENT or case.is_varlen:
            return None
        return mask_maker(case, context)


class FlashtrainPortable(Flashtrain):
    """The same on the portable kernels, where the Hopper kernels are there too."""

    name, title = "flashtrain-portable", "flashtrain, portable"

    def missing(self, device: torch.device) -> str | None:
        reason = hopper.unavailable(device)
        return None if reason is None else f"the same as flashtrain here: {reason}"

    def within(self) -> contextlib.AbstractContextManager[None]:
        return dispatch.force("portable")


class FlashtrainCompiled(Flashtrain):
    """The same functions under torch.compile, compiled for each case's exact shape."""

    name, title = "flashtrain-compiled", "flashtrain, compiled"

    def missing(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "measured on GPUs only"

    def applies(self, case: Case) -> bool:
        return case.compiled

    def attend(self, case: Case, context: Context) -> Attend:
        attention = super().attend(case, context)
        # A function of tensors, as in a model: what the benchmark does around the call is not looked at anew each time.
        compiled = fresh_compile(lambda q, k, v: attention(Inputs(q, k, v, q)))
        return lambda inputs: compiled(inputs.q, inputs.k, inputs.v)


class FlashtrainPlanned(Peer):
    """flash_attn_varlen_func, given the mask that its layers share instead of each making its own."""

    name, title = "flashtrain-planned", "flashtrain, planned once"

    def applies(self, case: Case) -> bool:
        return case.is_varlen

    def attend(self, case: Case, context: Context) -> Attend:
        return _varlen(case, context, self._mask(case, context))

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        return lambda: self._mask(case, context)

    def _mask(self, case: Case, context: Context) -> Any:
        bounds, total = context.cu_seqlens, case.batch * case.seqlen_q
        found = masks.varlen(bounds, bounds, total, total, causal=case.mask_name.causal)
        return found.planned(case.head_dim, case.dtype)


class FlashtrainPacked(Peer):
    """flash_attn_qkvpacked_func: q, k and v are slices of one tensor, and so are their gradients."""

    name, title = "flashtrain-packed", "flashtrain, packed"

    def applies(self, case: Case) -> bool:
        same = case.heads == case.kv_heads and case.seqlen_q == case.seqlen_k
        return same and case.kind in _BY_ARGUMENT and not case.features

    def attend(self, case: Case, context: Context) -> Attend:
        def attention(inputs: Inputs) -> Tensor:
            return first(flashtrain_kernels.flash_attn_qkvpacked_func(inputs.qkv, **options(case, inputs, None)))

        return attention

    def leaves(self, inputs: Inputs) -> list[Tensor]:
        return [inputs.qkv]

    def gradients(self, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = found[0].unbind(2)
        return dq, dk, dv


def options(case: Case, inputs: Inputs, mask: Any) -> dict[str, Any]:
    """The keyword arguments of a call, without those that have their defaults."""
    found: dict[str, Any] = {}
    if case.kind == "causal":
        found["causal"] = True
    if case.kind == "window":
        found["window_size"] = (case.mask_name.left, case.mask_name.right)
    if mask is not None:
        found["mask"] = mask
    if case.dropout:
        found["dropout_p"] = case.dropout
    if case.softcap:
        found["softcap"] = case.softcap
    if inputs.slopes is not None:
        found["alibi_slopes"] = inputs.slopes
    if inputs.bias is not None:
        found["bias"] = inputs.bias
    if inputs.sink is not None:
        found["learnable_sink"] = inputs.sink
    if case.deterministic:
        found["deterministic"] = True
    return found


def make_mask(case: Case, context: Context) -> Any:
    """The case's mask as the kernels take it, with its plan; None where it is an argument of the call."""
    if case.kind in _BY_ARGUMENT:
        return None
    return mask_maker(case, context)()


def unplanned_mask(case: Case, device: torch.device) -> Any:
    """The mask of a case, which is no table of blocks, as data and without a plan: what is shared among devices."""
    if case.kind in _BY_ARGUMENT:
        window = (case.mask_name.left, case.mask_name.right)
        return masks.sliding_window(case.seqlen_q, window, device=device)
    return _maker(case, device)()


def mask_maker(case: Case, context: Context) -> Callable[[], Any]:
    """Makes the mask from what a batch brings along on its device: that is made here, once, and not timed."""
    if case.is_block_sparse:
        return lambda: _block_mask(case, context)
    make = _maker(case, context.device)
    return lambda: make().planned(case.head_dim, case.dtype)


def _maker(case: Case, device: torch.device) -> Callable[[], Any]:
    seqlen = case.seqlen_k
    if case.kind == "prefix-lm":
        length = torch.tensor([prefix_length(seqlen)], device=device)
        return lambda: masks.prefix_lm(length, seqlen=seqlen)
    if case.kind == "global-window":
        tokens, window = global_sizes(seqlen)
        return lambda: masks.global_window(seqlen, tokens, (window, window), device=device)
    lengths = segment_lengths(case)
    segments, bounds = numbers(lengths, device)[None], starts(lengths, device)
    if case.kind == "shared-question":
        return lambda: masks.shared_question(segments)
    if case.kind == "causal-blockwise":
        return lambda: masks.causal_blockwise(masks.documents_from_cu_seqlens(bounds, seqlen))
    if case.kind == "prefix-lm-document":
        prefixes = torch.tensor([prefix_length(length) for length in lengths], device=device)[segments]
        return lambda: masks.prefix_lm(prefixes, documents=masks.documents_from_cu_seqlens(bounds, seqlen))
    if case.kind == "block-causal-document":
        return lambda: masks.block_causal(BLOCK_CAUSAL, masks.documents_from_cu_seqlens(bounds, seqlen))
    causal = case.mask_name.causal
    return lambda: masks.document(masks.documents_from_cu_seqlens(bounds, seqlen), causal=causal)


def _block_mask(case: Case, context: Context) -> Any:
    table = context.shared
    if not isinstance(table, Tensor):
        raise TypeError(f"{case.mask} must have a table of blocks, not {type(table).__name__}")
    return block_sparse.block_mask(table, block_size=BLOCK_SIZE, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k)


def _cached(case: Case, context: Context) -> Attend:
    def attention(inputs: Inputs) -> Tensor:
        k, v, table = inputs.pages if case.page else (inputs.k, inputs.v, None)
        function = flashtrain_kernels.flash_attn_with_kvcache
        return first(function(inputs.q, k, v, cache_seqlens=context.filled, block_table=table))

    return attention


def _varlen(case: Case, context: Context, mask: Any) -> Attend:
    bounds, longest = context.cu_seqlens, context.longest
    found: dict[str, Any] = {"dropout_p": case.dropout} if case.dropout else {}
    if mask is not None:
        found["mask"] = mask
    elif case.mask_name.causal:
        found["causal"] = True

    def attention(inputs: Inputs) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        function = flashtrain_kernels.flash_attn_varlen_func
        return first(function(q, k, v, bounds, bounds, longest, longest, **found)).view_as(inputs.q)

    return attention
