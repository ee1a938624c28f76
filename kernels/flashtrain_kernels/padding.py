"""Batches with padding to packed tokens and back, as flash_attn.bert_padding 2.8 does.

B batch, S sequence, T packed tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import check_device, check_length, dtype_name


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or 0 and 1: 1 where there is a token.
        unused_mask: (B, S), 1 where space is kept although nothing is used there (never 1 where attention_mask is).

    Returns:
        (hidden_states (T, ...), indices (T,) int64 into the B * S places, cu_seqlens (B + 1,) int32, the longest
        sequence's length, and the used tokens of each sequence (B,) int32). T, cu_seqlens and the longest length count
        the unused places too. Waits for the device, as T and the longest length are Python's. Differentiable.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"hidden_states must be a tensor (B, S, ...), not {type(hidden_states).__name__}")
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states must have the shape (B, S, ...), not {tuple(hidden_states.shape)}")
    _check_mask("attention_mask", attention_mask, hidden_states)
    places = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        places = attention_mask + unused_mask
    lengths = places.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(places.flatten()).flatten()
    longest = int(lengths.max().item()) if lengths.numel() else 0
    cu_seqlens = functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back: the inverse of `unpad_input`, with zeros as padding.

    Args:
        hidden_states: (T, ...).
        indices: (T,) from `unpad_input`.
        batch: B.
        seqlen: S.

    Returns:
        (B, S, ...). Differentiable.

    Raises:
        TypeError, ValueError: the message names the argument; that the indices lie within B * S is not checked.
    """
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"hidden_states must be a tensor (T, ...), not {type(hidden_states).__name__}")
    if not isinstance(indices, Tensor):
        raise TypeError(f"indices must be an int64 tensor (T,), not {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int64 or int32, not {dtype_name(indices.dtype)}")
    check_length("batch", batch)
    check_length("seqlen", seqlen)
    if hidden_states.dim() < 1 or indices.dim() != 1 or indices.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"indices must have the shape (T,) for hidden_states (T, ...), not {tuple(indices.shape)} for "
            f"{tuple(hidden_states.shape)}"
        )
    check_device("indices", indices, hidden_states.device, "hidden_states")
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor (B, S), not {type(mask).__name__}")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must have the shape (B, S) = {tuple(hidden_states.shape[:2])}, not {tuple(mask.shape)}"
        )
    check_device(name, mask, hidden_states.device, "hidden_states")
