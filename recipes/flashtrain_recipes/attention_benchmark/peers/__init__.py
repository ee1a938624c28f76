"""The implementations that are measured, each behind the same few calls (base.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashtrain_recipes.attention_benchmark.peers.base import Peer
from flashtrain_recipes.attention_benchmark.peers.flash_attn import FlashAttn, FlashAttn3, FlashAttn4
from flashtrain_recipes.attention_benchmark.peers.ours import (
    Flashtrain,
    FlashtrainCompiled,
    FlashtrainPacked,
    FlashtrainPlanned,
    FlashtrainPortable,
)
from flashtrain_recipes.attention_benchmark.peers.pytorch import Flex, Sdpa, Standard, VarlenAttn

__all__ = ["Peer", "all_peers", "choose_peers"]


def all_peers(device_type: str = "cuda") -> list[Peer]:
    """One of each, in the order of settings.IMPLEMENTATIONS."""
    flash = "torch SDPA, FlashAttention-2" if device_type == "cuda" else "torch SDPA, flash"
    return [
        Flashtrain(),
        FlashtrainPacked(),
        FlashtrainPlanned(),
        FlashtrainCompiled(),
        FlashtrainPortable(),
        Sdpa("sdpa-flash", flash, "FLASH_ATTENTION"),
        Sdpa("sdpa-cudnn", "torch SDPA, cuDNN", "CUDNN_ATTENTION"),
        Sdpa("sdpa-efficient", "torch SDPA, efficient", "EFFICIENT_ATTENTION"),
        Sdpa("sdpa-math", "torch SDPA, math", "MATH"),
        Standard(),
        Flex(),
        VarlenAttn(),
        FlashAttn(),
        FlashAttn3(),
        FlashAttn4(),
    ]


def choose_peers(
    names: Sequence[str] | None, device: torch.device, *, matrices: bool = True
) -> tuple[list[Peer], dict[str, str]]:
    """(the implementations that can run on the device, {title of each that cannot: why}). names None: all.

    matrices: whether torch's SDPA is given, as matrices, the masks that it has no name for.
    """
    chosen = [peer for peer in all_peers(device.type) if names is None or peer.name in names]
    for peer in chosen:
        if isinstance(peer, Sdpa):
            peer.matrices = peer.matrices and matrices
    missing = {peer.title: reason for peer in chosen if (reason := peer.missing(device)) is not None}
    return [peer for peer in chosen if peer.title not in missing], missing
