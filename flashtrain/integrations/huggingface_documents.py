"""Packed documents in transformers models: from the layers' arguments to the
mask that separates them.

Causal models find packed documents in position_ids by themselves and put them into the mask. In
other models the layers receive the caller's cu_seq_lens_q and cu_seq_lens_k (transformers' names
for flash-attn's cumulative lengths), or position_ids, where the model passes them on (BERT and
Llama do, ModernBERT does not).

Shapes: B batch, S sequence, N documents, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_document_search import holds_no_documents
from flashtrain.integrations.huggingface_masks import AttentionMask
from flashtrain.models.sharded_sequence import sharded_sequence
from flashtrain_kernels.environment import autocast_dtype
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
from flashtrain_kernels.masks.rows import ordinals

# The current batch's masks, by the tensor that each was made from, so that the layers
# of a model share one.
_MADE = WeakTensorKeyDictionary()
# source, key and mask of the latest without tensors.
_latest: tuple[TensorWeakRef, Any, AttentionMask] | None = None


def document_lengths(position_ids: Tensor) -> dict[str, Any]:
    """Make the arguments by which any transformers model separates packed documents; this
    synchronizes the device.

        model(input_ids, position_ids=position_ids, **document_lengths(position_ids))

    Bidirectional models that do not pass position_ids to their layers
    (ModernBERT) need these arguments.

    Args:
        position_ids: (B, S) integers that begin anew at each document, at a position that is at
            most the row's first one (0; in RoBERTa's family the padding index + 1).

    Returns:
        cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32 over the flattened rows,
        max_length_q and max_length_k.
    """
    begins = (position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1) & (
        position_ids <= position_ids[:, :1]
    )
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    bounds = torch.cat((starts, starts.new_full((1,), position_ids.numel())))
    longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def with_documents(
    requested: AttentionMask, query: Tensor, others: dict[str, Any]
) -> AttentionMask:
    """Restrict the mask of a self-attention layer to the documents that the
    caller's arguments describe.

    Args:
        requested: The layer's mask.
        query: A tensor with the layer's head dimension and dtype; its values are not read.
        others: The layer's further arguments: cu_seq_lens_q with cu_seq_lens_k, else position_ids
            (not used with a padding mask).

    Raises:
        UserError: cu_seq_lens with a key/value cache.
    """
    if requested.settled:
        return requested
    lengths, positions = others.get("cu_seq_lens_q"), others.get("position_ids")
    if lengths is not None and others.get("cu_seq_lens_k") is not None:
        if requested.seqlen_q != requested.seqlen_k:
            raise UserError(
                f"cu_seq_lens_q and cu_seq_lens_k with {requested.seqlen_q} queries "
                f"and {requested.seqlen_k} keys: expected as many keys as queries. Use "
                "them without a cache."
            )
        return _made_once(lengths, requested, query, _from_lengths)
    square = requested.seqlen_q == requested.seqlen_k > 1
    if (
        not square
        or not isinstance(positions, Tensor)
        or positions.shape[1:] != (requested.seqlen_q,)
    ):
        return requested
    # Outside torch.compile a mask of intervals is one of padding, or contains
    # the documents already.
    if requested.bias is not None or (
        requested.mask is not None and not torch.compiler.is_compiling()
    ):
        return requested
    return _made_once(positions, requested, query, _from_positions)


def settled(given: Any, hidden: Tensor, others: dict[str, Any], *, head_dim: int) -> Any:
    """Return the mask of a causal model's layer, restricted to packed documents, before
    the compiled layer runs.

    Compiled code cannot search for documents: every layer would make a document mask,
    whatever the positions.

    Args:
        given: The layer's attention_mask. Masks of other types, and those of sharded sequences,
            are returned unchanged.
        hidden: The layer's input, (B, S, E).
        others: The layer's further arguments, as in with_documents.
        head_dim: The layer's head dimension.
    """
    if sharded_sequence() is not None or not isinstance(given, AttentionMask | None):
        return given
    query = hidden.new_empty(0, 0, 0, head_dim, dtype=autocast_dtype(hidden.device.type))
    batch, seqlen = hidden.shape[:2]
    requested = AttentionMask(batch, seqlen, seqlen, causal=True) if given is None else given
    return with_documents(requested, query, others)._replace(settled=True)


def _from_lengths(cu_seq_lens: Tensor, batch: int, seqlen: int) -> Documents:
    """Return the Documents (B, S) between the boundaries cu_seq_lens in the flattened rows."""
    found = documents_from_cu_seqlens(cu_seq_lens, batch * seqlen)
    row = torch.arange(batch, device=cu_seq_lens.device, dtype=torch.int32)[:, None] * seqlen
    return Documents(*((bound.view(batch, seqlen) - row).clamp(0, seqlen) for bound in found))


def _from_positions(position_ids: Tensor, batch: int, seqlen: int) -> Documents | None:
    """Return the Documents (B, S) that begin where positions begin anew; None if no row's do."""
    # A row whose positions jump beyond its first one, or jump at every token, is one document. This
    # synchronizes the device unless transformers has searched the positions or made them. Under
    # torch.compile documents are always made.
    if holds_no_documents(position_ids):
        return None
    breaks = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0))
    anew = ((position_ids <= position_ids[:, :1]) | ~breaks).all(1)
    packed = anew & breaks.any(1) & ~breaks[:, 1:].all(1)
    if not torch.compiler.is_compiling() and not bool(packed.any()):
        return None
    return documents_from_ids((breaks & packed[:, None]).cumsum(1).expand(batch, seqlen))


def _made_once(
    source: Tensor,
    requested: AttentionMask,
    query: Tensor,
    find: Callable[[Tensor, int, int], Documents | None],
) -> AttentionMask:
    """Return the mask `requested`, restricted to the documents that find(source, batch, seqlen)
    returns; it is made once for all layers with the same source and mask."""

    def make() -> AttentionMask:
        documents = find(source, requested.batch, requested.seqlen_q)
        return requested if documents is None else _within(requested, documents, query)

    if torch.compiler.is_compiling():
        return make()
    global _latest
    mask_of = None if requested.mask is None else id(requested.mask.queries)
    bias_of = None if requested.bias is None else id(requested.bias)
    version = 0 if source.is_inference() else source._version  # inference tensors have no version
    key = version, *requested[:5], mask_of, bias_of, query.shape[3], query.dtype
    latest = _latest  # a look-up in _MADE takes as long as a short call
    if latest is not None and latest[1] == key and latest[0]() is source:
        return latest[2]
    made = _MADE.setdefault(source, {})
    known = made.get(key)
    if known is None:
        # `requested` too, so that the objects behind the key's ids stay alive.
        known = made[key] = (requested, make())
    # masks with tensors are freed with their source.
    if known[1].mask is None and known[1].bias is None:
        _latest = TensorWeakRef(source), key, known[1]
    return known[1]


def _within(requested: AttentionMask, documents: Documents, query: Tensor) -> AttentionMask:
    start, end = documents
    if requested.mask is None:
        index = torch.arange(requested.seqlen_q, device=start.device, dtype=torch.int32)[None]
        left, right = requested.window_size[0], 0 if requested.causal else requested.window_size[1]
        low = start if left < 0 else torch.maximum(start, index - left)
        high = end if right < 0 else torch.minimum(end, index + right + 1)
        position, begin, keys = index.expand_as(start), start, None
    else:
        rows, keys = requested.mask.queries, requested.mask.keys
        low, high = torch.maximum(rows[LOW], start), torch.minimum(rows[HIGH], end)
        position, begin = rows[POSITION], torch.maximum(rows[START], start)
    number = ordinals(start).to(torch.int32)
    mask = Mask(torch.stack((low, high, position, begin, number)), keys, requested.seqlen_k)
    planned = mask.planned(query.shape[3], query.dtype) if sharded_sequence() is None else mask
    # Field by field: torch.compile (2.11) does not follow a slice of a tuple's subclass.
    return AttentionMask(
        requested.batch, requested.seqlen_q, requested.seqlen_k, mask=planned, bias=requested.bias
    )
