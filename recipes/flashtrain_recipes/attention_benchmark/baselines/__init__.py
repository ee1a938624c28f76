"""The implementations of attention that are measured, each behind the interface in base.py."""

from __future__ import annotations

from flashtrain_recipes.attention_benchmark.baselines.base import AttentionBaseline
from flashtrain_recipes.attention_benchmark.baselines.flash_attn import (
    FlashAttn,
    FlashAttn3,
    FlashAttn4,
)
from flashtrain_recipes.attention_benchmark.baselines.ours import (
    Flashtrain,
    FlashtrainCompiled,
    FlashtrainPlanned,
    FlashtrainPortable,
)
from flashtrain_recipes.attention_benchmark.baselines.pytorch import (
    Flex,
    Sdpa,
    Standard,
    VarlenAttn,
)

__all__ = ["AttentionBaseline", "all_baselines"]


def all_baselines(device_type: str = "cuda", *, matrices: bool = True) -> list[AttentionBaseline]:
    """Return one instance of every implementation, in the order of the tables.

    Args:
        device_type: "cuda" or "cpu".
        matrices: whether torch's SDPA gets masks other than full and causal as matrices; if
            not, it is not measured with such masks.
    """
    flash = "torch SDPA, FlashAttention-2" if device_type == "cuda" else "torch SDPA, flash"
    return [
        Flashtrain(),
        FlashtrainPlanned(),
        FlashtrainCompiled(),
        FlashtrainPortable(),
        Sdpa("sdpa-flash", flash, "FLASH_ATTENTION", matrices=False),
        Sdpa("sdpa-cudnn", "torch SDPA, cuDNN", "CUDNN_ATTENTION", matrices=matrices),
        Sdpa("sdpa-efficient", "torch SDPA, efficient", "EFFICIENT_ATTENTION", matrices=matrices),
        Sdpa("sdpa-math", "torch SDPA, math", "MATH", matrices=matrices),
        Standard(),
        Flex(),
        VarlenAttn(),
        FlashAttn(),
        FlashAttn3(),
        FlashAttn4(),
    ]
