"""The mask of each layer of a decoder: a layer of attention to a window or a chunk gets the
batch's mask, restricted to it; a layer that keeps states gets the documents of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.attention_functions import AnyMask, plan_mask
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import LayerSpec
from flashtrain.models.sharded_sequence import sharded_sequence
from flashtrain_kernels import BlockMask, masks
from flashtrain_kernels.recurrences import Rows


def layer_masks(
    mask: AnyMask | None,
    x: Tensor,
    layers: Sequence[LayerSpec],
    *,
    attention: str,
    dropout: float = 0.0,
    positions: Tensor,
    read: int | None = None,
) -> list[Any]:
    """Return the mask of each layer; layers of attention with the same window, chunk and head
    dimension share one planned mask, layers that keep states one Rows.

    Args:
        mask, x, attention, dropout: As plan_mask's.
        layers: What the layers are.
        positions: Of the tokens, (B or 1, S).
        read: The number of tokens before them, which a cache has; None: no cache.
    """
    planned: dict[Any, Any] = {}
    found: list[Any] = []
    sequence = sharded_sequence()
    for mixer in (layer.mixer for layer in layers):
        chunk = getattr(mixer, "chunk", None)
        if mixer.crosses_devices == "state" and read is None:
            kind: Any = Rows
            planned[kind] = planned[kind] if kind in planned else _rows(x, positions)
        elif not isinstance(mixer, AttentionSpec) or (mask is None and chunk is None):
            kind = None
            planned[kind] = mask
        elif (kind := (mixer.window, chunk, mixer.head_dim)) not in planned:
            narrow: Any = mask
            if mask is None:
                tokens = x.shape[1] if sequence is None else sequence.length
                narrow = masks.causal(tokens, tokens + (read or 0), device=x.device)
            if not isinstance(narrow, BlockMask):
                narrow = narrow if mixer.window is None else narrow.within(mixer.window - 1)
                narrow = narrow if chunk is None else narrow.chunked(chunk)
            planned[kind] = plan_mask(
                narrow, x, attention=attention, head_dim=mixer.head_dim, dropout=dropout
            )
        found.append(planned[kind])
    return found


@torch.compiler.disable  # of documents, a graph would guard the number
def _rows(x: Tensor, positions: Tensor) -> Rows:
    """Return the documents of x (B, S, E), also over the borders of devices."""
    positions, sequence = positions.expand(x.shape[0], -1), sharded_sequence()
    if sequence is None:
        return Rows(positions)
    return sequence.rows(positions, sequence.gathered(positions))
