"""The groups attention, memory and hardware. A default of None is decided when the run starts."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, above, at_least
from flashtrain.settings.options import (
    Accelerator,
    ActivationCheckpointing,
    Attention,
    Demo,
    Gpu,
    Precision,
    option,
)


@dataclass
class AttentionSettings:
    """The attention (conf/attention)."""

    # flashtrain's kernels, torch's attention, or the S x S matrix in full.
    name: str = option("flash", Attention)


@dataclass
class MemorySettings:
    """Ways to need less memory for activations, with the same losses, in longer steps."""

    # What a block saves for its backward: none saves everything, selective its input and
    # attention's output, full its input; auto takes the fastest that is estimated to fit, which
    # may be selective in a part of the blocks and none in the others.
    activation_checkpointing: str = option("auto", ActivationCheckpointing)
    offload: bool = False  # move the saved inputs of blocks to host memory
    ffn_chunk: int | None = None  # tokens computed together in the feed-forward; null: auto, or all
    loss_chunk: int | None = None  # tokens computed together in the loss; null: auto, or all

    def check(self) -> None:
        if self.offload and self.activation_checkpointing == "none":
            raise UserError(
                "memory.offload=true moves the inputs of blocks to host memory, and "
                "memory.activation_checkpointing=none saves all of a block. "
                "Use memory.activation_checkpointing=selective, full or auto."
            )
        at_least("memory.ffn_chunk", self.ffn_chunk, 1)
        at_least("memory.loss_chunk", self.loss_chunk, 1)


@dataclass
class HardwareSettings:
    """The hardware to run on (conf/hardware)."""

    # Where the run computes; auto: on GPUs if there are some.
    accelerator: str = option("auto", Accelerator)
    # 64-true: of whole weights; null: what the device does best.
    precision: str | None = option(None, Precision)
    # Dense peak for MFU; null: from flashtrain's table, or MFU left out.
    peak_tflops: float | None = None
    demo: str = option("auto", Demo)  # when a recipe's small demo runs; auto: without a GPU
    # The GPU that mode=plan plans for; null: this machine's; 8xh100: h100, trainer.devices=8.
    plan_for: str | None = option(None, Gpu)

    def check(self) -> None:
        above("hardware.peak_tflops", self.peak_tflops, 0)
