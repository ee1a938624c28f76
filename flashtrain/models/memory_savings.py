"""What a model does to need less memory for activations: none of it changes the result or the weights."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, unknown

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class MemorySavings:
    """Time given for memory, in a training step.

    checkpointing: what of a block stays until its backward, which computes the rest again (Chen et al. 2016, "Training
        Deep Nets with Sublinear Memory Cost"): "none" keeps everything, "selective" the block's input and what its
        attention computed (output and log-sum-exp), so that attention alone is not computed twice (Korthikanti et al.
        2022, "Reducing Activation Recomputation in Large Transformer Models"), "full" the input alone.
    offload: the blocks' inputs wait in pinned host memory and not on the GPU; with "full" only.
    ffn_chunk: tokens that the feed-forward computes at once, forward and backward (None: all).
    loss_chunk: tokens whose logits are stored at once (None: as many as the loss takes by itself).
    UserError, when built: an unknown name, a number below 1, offloading without full checkpointing.
    """

    checkpointing: str = "none"
    offload: bool = False
    ffn_chunk: int | None = None
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.checkpointing not in CHECKPOINTING:
            raise unknown("activation checkpointing", self.checkpointing, CHECKPOINTING)
        if self.offload and self.checkpointing != "full":
            raise UserError(
                f"offload moves the inputs that full checkpointing keeps, and checkpointing is {self.checkpointing}. "
                "Possible: checkpointing full, or no offload."
            )
        for name in ("ffn_chunk", "loss_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value}. Possible: 1 or more tokens, or none for all at once.")

    def describe(self) -> str:
        """Such as "full checkpointing, inputs in host memory, feed-forward by 16,384 tokens"; "" for no savings."""
        parts = [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        parts += ["inputs in host memory"] if self.offload else []
        parts += [f"feed-forward by {self.ffn_chunk:,} tokens"] if self.ffn_chunk else []
        parts += [f"loss by {self.loss_chunk:,} tokens"] if self.loss_chunk else []
        return ", ".join(parts)
