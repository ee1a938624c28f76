"""The attention masks that the settings group `mask` names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtrain.models.generation import MaskMaker, row_mask
from flashtrain.registry import component, register
from flashtrain_kernels import Mask, masks

if TYPE_CHECKING:
    from flashtrain.settings.mask import MaskSettings


@register("mask", "causal")
@register("mask", "document")
def _document(settings: MaskSettings, *, documents: Tensor, **_: Any) -> Mask | None:
    # None: the model's own causal rule.
    return masks.document(documents, causal=True) if settings.documents else None


@register("mask", "window")
def _window(
    settings: MaskSettings, *, documents: Tensor, seqlen: int, device: torch.device, **_: Any
) -> Mask:
    window, within = (int(settings.window or 1) - 1, 0), documents if settings.documents else None
    return masks.sliding_window(seqlen, window, documents=within, device=device)


@register("mask", "chunked")
def _chunked(
    settings: MaskSettings, *, positions: Tensor, seqlen: int, device: torch.device, **_: Any
) -> Mask:
    if not settings.documents:
        positions = torch.arange(seqlen, device=device)[None]
    # A document a chunk.
    return masks.document((positions % int(settings.chunk or 1) == 0).cumsum(1), causal=True)


@register("mask", "prefix")
def _prefix(
    settings: MaskSettings, *, documents: Tensor, seqlen: int, device: torch.device, **_: Any
) -> Mask:
    if settings.documents:
        return masks.prefix_lm(
            torch.full_like(documents, int(settings.prefix or 0)), documents=documents
        )
    return masks.prefix_lm(
        torch.full((1,), int(settings.prefix or 0), device=device), seqlen=seqlen
    )


def make_mask(settings: MaskSettings, *, packed: bool = True) -> MaskMaker | None:
    """Return a function that makes each batch's mask, for LanguageModel and `generate`;
    None for a causal mask.

    Args:
        settings: LanguageSettings.applied_mask of the run.
        packed: whether a row may hold several documents.
    """
    if settings.name in ("causal", "document") and not (packed and settings.documents):
        return None
    return partial(component("mask", settings.name), settings)


def attended_context(settings: MaskSettings, context: int) -> int:
    """Return the context length at which FLOPs are counted under this mask.

    A token of a causal sequence of the returned length sees as many tokens, on average, as a token
    of a document of `context` tokens sees under the mask. Shorter documents in a row are not
    counted here: their lengths are known only from a batch's mask, which `causal_length` uses.
    """
    make = make_mask(settings, packed=False)
    if make is None:
        return context
    mask = row_mask(make, context, torch.device("cpu"))
    return context if mask is None else max(1, round(causal_length(mask).item()))


def causal_length(mask: Mask) -> Tensor:
    """Return the length of a causal sequence whose tokens see as many keys, on average, as tokens
    see under this mask.

    The result is a scalar tensor on the mask's device, which the host does not read.
    """
    from flashtrain.distributed.context.work import visible_keys

    seen = visible_keys(mask)
    return 2 * seen.sum() / seen.numel() - 1
