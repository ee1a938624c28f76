"""Indexing along the tokens of a batch, as fast as the memory allows.

Shapes: B batch rows, m tokens of a row, p tokens taken or written. Indices are (B, p), or (1,
p) for all batch rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = torch.int64


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x (B, m, ...) at these indices (B or 1, p), as a tensor (B, p, ...)."""
    words = _words(x)
    if index.shape[0] == 1:
        found = words.index_select(1, index[0])
    else:
        found = words[torch.arange(x.shape[0], device=x.device)[:, None], index]
    return found if words is x else found.view(x.dtype)


def put(target: Tensor, index: Tensor, x: Tensor) -> None:
    """Write the p tokens of each row of x (B, p, ...) to these indices (B or 1, p) of the same row
    of target (B, m, ...), which has x's dtype."""
    words, written = _both(target, x)
    if index.shape[0] == 1:
        words.index_copy_(1, index[0], written)
    else:
        words[torch.arange(x.shape[0], device=x.device)[:, None], index] = written


def copy(target: Tensor, x: Tensor) -> None:
    """Write x into target, of the same shape and dtype, both with any strides."""
    words, written = _both(target, x)
    words.copy_(written)


def take_into(target: Tensor, x: Tensor, index: Tensor) -> None:
    """Write the tokens of x (m, ...) at the indices (p,) into target (p, ...), which has x's dtype
    and any strides."""
    words, read = _both(target, x)
    torch.index_select(read, 0, index, out=words)


def ascending(tokens: Tensor) -> Tensor:
    """Return the indices that sort each row of token numbers (B or 1, p), in that shape; padding
    (numbers below 0) comes last, and the sort is stable."""
    return torch.where(tokens < 0, torch.iinfo(torch.int64).max, tokens).argsort(dim=1, stable=True)


def inverse(order: Tensor, length: int) -> Tensor:
    """Return (B or 1, length): for each number 0 .. length - 1 its index in the same row of
    `order` (B or 1, m), or -1 where the row does not contain the number."""
    places = torch.full((order.shape[0], length), -1, dtype=torch.int64, device=order.device)
    index = torch.arange(order.shape[1], device=order.device).expand(order.shape[0], -1)
    return places.scatter_(1, order, index)


def _both(target: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors viewed as words of 8 bytes (_words), or both as they are if only one of
    them can be."""
    words, written = _words(target), _words(x)
    return (target, x) if words is target or written is x else (words, written)


def _words(x: Tensor) -> Tensor:
    """Return x viewed as int64 words of 8 bytes; x itself where its sizes and strides do not allow
    that, or it needs a gradient."""
    # torch copies indexed elements one by one: half-precision ones at a quarter of what
    # the memory could do.
    each = WORD.itemsize // x.element_size()
    if each <= 1 or x.dim() < 3 or (x.requires_grad and torch.is_grad_enabled()):
        return x
    whole = x.stride(-1) == 1 and not any(
        n % each for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    )
    return x.view(WORD) if whole else x
