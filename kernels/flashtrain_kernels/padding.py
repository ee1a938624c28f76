"""Conversion between padded batches and packed tokens, as in flash_attn.bert_padding 2.8.

B batch, S sequence, T packed tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .checks import INTEGERS, check_device, check_dtype, check_length, check_shape


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch one after the other, without the padding.
    Differentiable; waits for the device.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or 0 and 1: 1 where there is a token.
        unused_mask: (B, S), 1 for padding that is to be packed like a token (never 1
            where attention_mask is 1).

    Returns:
        (hidden_states (T, ...), indices (T,) int64 into the B * S places, cu_seqlens (B + 1,)
        int32, the longest sequence's length, and the number of tokens of each sequence (B,) int32).
        All but the last count the tokens of unused_mask too.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_dtype("hidden_states", hidden_states, "(B, S, ...)")
    if hidden_states.dim() < 2:
        raise ValueError(
            f"hidden_states must have the shape (B, S, ...), not {tuple(hidden_states.shape)}"
        )
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
    """Convert packed tokens to a padded batch, with zeros as padding: the inverse of
    `unpad_input`. Differentiable.

    Args:
        hidden_states: (T, ...).
        indices: (T,) from `unpad_input`; not checked to be below B * S.
        batch: B.
        seqlen: S.

    Returns:
        (B, S, ...).

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_dtype("hidden_states", hidden_states, "(T, ...)")
    check_dtype("indices", indices, "(T,)", INTEGERS)
    check_length("batch", batch)
    check_length("seqlen", seqlen)
    if hidden_states.dim() < 1 or indices.dim() != 1 or indices.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            "indices must have the shape (T,) for hidden_states (T, ...), "
            f"not {tuple(indices.shape)} for {tuple(hidden_states.shape)}"
        )
    check_device("indices", indices, hidden_states.device, "hidden_states")
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_dtype(name, mask, "(B, S)")
    check_shape(name, mask, hidden_states.shape[:2], "(B, S)")
    check_device(name, mask, hidden_states.device, "hidden_states")
