"""How a mask is described, in plain PyTorch. (The Triton side of the same rules: portable/tiles.py.)

B batch, S sequence (Sq queries, Sk keys where they differ).

A query sees a key when every rule that is switched on allows the pair:

- causal, aligned bottom-right as in flash-attn: the last query sees every key, so query i sees key j
  when j <= i + Sk - Sq;
- documents: both tokens belong to the same document of a packed row (needs Sq == Sk).
"""

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """Which document each token of a packed batch belongs to, as the documents' boundaries.

    start, end: (B, S) int32; start[b, i] and end[b, i] are the first index, and one past the last index, of the
    document
    that token i of row b belongs to. Documents are contiguous, so both are non-decreasing along S: the kernels rely
    on it.
    A NamedTuple of tensors, so torch.compile and activation checkpointing pass it through. Build it once a batch with
    `documents_from_ids` and give it to every layer.
    """

    start: torch.Tensor
    end: torch.Tensor


def documents_from_ids(ids: torch.Tensor) -> Documents:
    """Document boundaries from document numbers, computed on the device without a synchronisation.

    ids: (B, S) of any integer dtype, non-decreasing along S (not checked: that would wait for the device).
    Returns Documents with (B, S) int32 tensors. Raises TypeError or ValueError for anything that is no such tensor.
    """
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids must be an integer tensor (B, S), not {kind}")
    if ids.dim() != 2:
        raise ValueError(f"ids must have the two dimensions (B, S), not the shape {tuple(ids.shape)}")
    ids = ids.contiguous()
    start = torch.searchsorted(ids, ids, right=False, out_int32=True)
    end = torch.searchsorted(ids, ids, right=True, out_int32=True)
    return Documents(start, end)


def visible(
    seqlen_q: int, seqlen_k: int, *, causal: bool, documents: Documents | None, device: torch.device | str
) -> torch.Tensor | None:
    """The dense mask: True where a query sees a key. (Sq, Sk), or (B, 1, Sq, Sk) with documents; None where all is
    seen."""
    key = torch.arange(seqlen_k, device=device)[None, :]
    mask = None
    if causal:
        query = torch.arange(seqlen_q, device=device)[:, None]
        mask = key <= query + (seqlen_k - seqlen_q)
    if documents is not None:
        same = (key >= documents.start[:, :, None]) & (key < documents.end[:, :, None])
        mask = (same if mask is None else same & mask)[:, None]
    return mask


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """How many (query, key) pairs one head computes, for FLOP counts. Documents live in tensors, so they are not
    counted."""
    if not causal:
        return seqlen_q * seqlen_k
    if seqlen_q <= seqlen_k:
        return seqlen_q * seqlen_k - seqlen_q * (seqlen_q - 1) // 2
    return seqlen_k * (seqlen_k + 1) // 2
