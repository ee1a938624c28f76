"""Documents packed into a row, where transformers' mask function does not hear of them.

Causal models of transformers find documents from position_ids themselves and put them into the mask. For others the
layers get what the caller gave the model: cu_seq_lens_q and cu_seq_lens_k (transformers' names for flash-attn's
cumulative lengths), or position_ids, where the model passes them on (BERT and Llama do, ModernBERT does not).

B batch, S sequence, T = B * S tokens, N documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_masks import AttentionMask
from flashtrain_kernels.masks import (
    HIGH,
    LOW,
    POSITION,
    START,
    Documents,
    Mask,
    documents_from_cu_seqlens,
    documents_from_ids,
)
from flashtrain_kernels.masks.constructors import ordinals

# The masks of the batch at hand, by the tensor they were made from, so that the layers of a model share one.
_MADE = WeakTensorKeyDictionary()


def document_lengths(position_ids: Tensor) -> dict[str, Any]:
    """The arguments with which a model keeps the documents of packed rows apart, whatever model it is:

        model(input_ids, position_ids=position_ids, **document_lengths(position_ids))

    position_ids: (B, S) integers that are 0 at the first token of each document.
    Returns cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32, over the rows one after the other, and max_length_q and
    max_length_k. Needed for models that see both ways and do not pass position_ids to their layers (ModernBERT).
    Waits for the device. UserError: position_ids that are no such tensor.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.is_floating_point():
        what = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__
        raise UserError(f"position_ids must be an integer tensor (B, S), not {what}.")
    begins = position_ids == 0
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    bounds = torch.cat((starts, starts.new_full((1,), position_ids.numel())))
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def with_documents(asked: AttentionMask, query: Tensor, others: dict[str, Any]) -> AttentionMask:
    """The mask of a layer that sees itself, with the documents in it that the caller's arguments tell of.

    query: (B, S, H, D). others: the layer's further arguments: cu_seq_lens_q with cu_seq_lens_k, else position_ids
    (used where the mask is none of padding). UserError: lengths with a cache, whose keys they say nothing of.
    """
    lengths, positions = others.get("cu_seq_lens_q"), others.get("position_ids")
    if lengths is not None and others.get("cu_seq_lens_k") is not None:
        if asked.seqlen_q != asked.seqlen_k:
            raise UserError(
                f"cu_seq_lens_q and cu_seq_lens_k need as many keys as queries, not {asked.seqlen_k} and "
                f"{asked.seqlen_q}: give them without a cache."
            )
        return _made_once(lengths, asked, query, _from_lengths)
    square = asked.seqlen_q == asked.seqlen_k > 1
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != asked.seqlen_q or not square:
        return asked
    # Outside torch.compile a mask of intervals is of padding, or holds the documents already.
    if asked.bias is not None or (asked.mask is not None and not torch.compiler.is_compiling()):
        return asked
    return _made_once(positions, asked, query, _from_positions)


def _from_lengths(cu_seq_lens: Tensor, batch: int, seqlen: int) -> Documents:
    """Documents (B, S) from boundaries within the rows one after the other."""
    found = documents_from_cu_seqlens(cu_seq_lens, batch * seqlen)
    row = torch.arange(batch, device=cu_seq_lens.device, dtype=torch.int32)[:, None] * seqlen
    return Documents(*((bound.view(batch, seqlen) - row).clamp(0, seqlen) for bound in found))


def _from_positions(position_ids: Tensor, batch: int, seqlen: int) -> Documents | None:
    """Documents (B, S) of the rows whose positions restart at 0; None when no row is such a one.

    Positions that break off to anything but 0, or at every token, are not those of packed documents: such a row is one
    document. Waits for the device, except under torch.compile, where documents are made whatever the positions are.
    """
    breaks = torch.nn.functional.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    to_zero = ((position_ids == 0) | ~breaks).all(1) & (position_ids[:, 0] == 0)
    packed = to_zero & breaks.any(1) & ~breaks[:, 1:].all(1)
    if not torch.compiler.is_compiling() and not bool(packed.any()):
        return None
    return documents_from_ids((breaks & packed[:, None]).cumsum(1).expand(batch, seqlen))


def _made_once(
    source: Tensor, asked: AttentionMask, query: Tensor, find: Callable[[Tensor, int, int], Documents | None]
) -> AttentionMask:
    """`asked` within the documents that `find` makes of `source`; made once for all layers that ask the same."""

    def make() -> AttentionMask:
        documents = find(source, asked.batch, asked.seqlen_q)
        return asked if documents is None else _within(asked, documents, query)

    if torch.compiler.is_compiling():
        return make()
    made = _MADE.setdefault(source, {})
    mask_of = None if asked.mask is None else id(asked.mask.queries)
    key = (
        source._version,
        *asked[:5],
        mask_of,
        None if asked.bias is None else id(asked.bias),
        query.shape[3],
        query.dtype,
    )
    if key not in made:
        made[key] = (asked, make())  # `asked` too, so that what the key names by id stays
    return made[key][1]


def _within(asked: AttentionMask, documents: Documents, query: Tensor) -> AttentionMask:
    start, end = documents
    if asked.mask is None:
        index = torch.arange(asked.seqlen_q, device=start.device, dtype=torch.int32)[None]
        left, right = asked.window_size[0], 0 if asked.causal else asked.window_size[1]
        low = start if left < 0 else torch.maximum(start, index - left)
        high = end if right < 0 else torch.minimum(end, index + right + 1)
        position, begin, keys = index.expand_as(start), start, None
    else:
        rows, keys = asked.mask.queries, asked.mask.keys
        low, high = torch.maximum(rows[LOW], start), torch.minimum(rows[HIGH], end)
        position, begin = rows[POSITION], torch.maximum(rows[START], start)
    number = ordinals(documents).to(torch.int32)
    mask = Mask(torch.stack((low, high, position, begin, number)), keys, asked.seqlen_k)
    return AttentionMask(*asked[:3], mask=mask.planned(query.shape[3], query.dtype), bias=asked.bias)
