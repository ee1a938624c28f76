"""The mask of each layer of a decoder: a layer of attention to a window gets the batch's
mask, restricted to the window."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashtrain.models.attention_functions import AnyMask, plan_mask
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import LayerSpec
from flashtrain_kernels import BlockMask


def layer_masks(
    mask: AnyMask | None,
    x: Tensor,
    layers: Sequence[LayerSpec],
    *,
    attention: str,
    dropout: float = 0.0,
) -> list[AnyMask | None]:
    """Return the mask of each layer; layers of attention with the same window and head dimension
    share one planned mask.

    Args:
        mask, x, attention, dropout: As plan_mask's.
        layers: What the layers are.
    """
    planned: dict[tuple[int | None, int], AnyMask | None] = {}
    found = []
    for mixer in (layer.mixer for layer in layers):
        if not isinstance(mixer, AttentionSpec) or mask is None:
            found.append(mask)
            continue
        kind = mixer.window, mixer.head_dim
        if kind not in planned:
            narrow = mask
            if mixer.window is not None and not isinstance(mask, BlockMask):
                narrow = mask.within(mixer.window - 1)
            planned[kind] = plan_mask(
                narrow, x, attention=attention, head_dim=mixer.head_dim, dropout=dropout
            )
        found.append(planned[kind])
    return found
