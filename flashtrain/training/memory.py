"""What a training step will need of a GPU's memory, from the model's numbers alone, and the micro-batch that fits.

An estimate on the safe side, not a measurement: the constants below are kept in one place to be calibrated against
measured peaks. Letters: B micro-batch, S sequence, E embedding width, F feed-forward width, H query heads, V rows of
the embedding table, P parameters, T = B*S tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashtrain.errors import UserError, unknown

GIB = 2**30

# Bytes of one element, by precision: (weight, the copy of it that matrix products read, activation).
PRECISIONS: dict[str, tuple[int, int, int]] = {
    "32-true": (4, 0, 4),
    "bf16-mixed": (4, 2, 2),  # autocast keeps the half-precision copies of the weights until the backward has used them
    "16-mixed": (4, 2, 2),
    "bf16-true": (2, 0, 2),
}
RESIDUAL_BYTES = 4  # autocast leaves the residual stream in float32
ADAMW_STATES = 2  # first and second moment, each in the weights' own precision

# Tensors that one block keeps for its backward, in units of E (or F, or the width of keys and values) per token:
RESIDUALS_KEPT = 2  # the inputs of its two norms
NORM_OUTPUTS_KEPT = 2  # the inputs of the QKV and of the up projection
FFN_TENSORS_KEPT = 2  # before and after the activation function
EAGER_EXTRA = 1.35  # without torch.compile the intermediate results of norms, activation and casts are kept as well
STANDARD_BYTES_PER_SCORE = 8  # S x S attention: float32 scores and softmax, and their half-precision copies
LOGIT_COPIES = 1  # logits in the activations' precision
EAGER_LOGIT_FLOAT32_COPIES = 2  # their float32 softmax and its gradient, which torch.compile never stores
CHECKPOINTING = ("none", "selective", "full")
ATTENTIONS = ("flash", "sdpa", "standard")

FIXED_BYTES = int(0.5 * GIB)  # CUDA context, cuBLAS workspaces, the allocator's rounding
FREE_SHARE = 0.9  # of the free memory that the estimate may fill
MICRO_BATCH_CAP = 64


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device at the peak of a training step, by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    other: int = FIXED_BYTES

    @property
    def total(self) -> int:
        """All of them together, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.other

    def lines(self) -> list[str]:
        """The estimate to read: one line for each part, in GiB, and the total."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "other": self.other,
            "total": self.total,
        }
        return [f"{name:<12}{size / GIB:8.2f} GiB" for name, size in parts.items()]


def estimate_memory(
    parameters: int,
    *,
    layers: int,
    embed: int,
    heads: int,
    ffn: int,
    vocab_rows: int,
    context: int,
    micro_batch: int,
    kv_width: int | None = None,
    gated: bool = False,
    precision: str = "bf16-mixed",
    checkpointing: str = "none",
    compiled: bool = True,
    attention: str = "flash",
    shards: int = 1,
) -> MemoryEstimate:
    """Memory of one training step with AdamW, in bytes on one device.

    parameters: P, all of them. kv_width: K*D of grouped-query attention (None: E). gated: a SwiGLU feed-forward, which
    keeps one tensor of width F more. checkpointing: "none", "selective" (keeps each block's input and attention
    output) or "full" (its input only); the block under recomputation counts whole. attention: "standard" adds its
    S x S matrices. shards: devices that weights, gradients and optimiser states are divided among (FSDP2).
    Raises UserError for an unknown name or a number below 1.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if checkpointing not in CHECKPOINTING:
        raise unknown("activation checkpointing", checkpointing, CHECKPOINTING)
    if attention not in ATTENTIONS:
        raise unknown("attention", attention, ATTENTIONS)
    for name, value in (("layers", layers), ("context", context), ("micro_batch", micro_batch), ("shards", shards)):
        if value < 1:
            raise UserError(f"{name} must be 1 or more, got {value}")

    weight, copy, activation = PRECISIONS[precision]
    residual = RESIDUAL_BYTES if copy else activation
    tokens = micro_batch * context
    kv_width = embed if kv_width is None else kv_width

    # One token's bytes in one block.
    qkv = (embed + 2 * kv_width) * activation
    attended = embed * activation + 4 * heads  # output and float32 LSE
    block = (
        RESIDUALS_KEPT * embed * residual
        + NORM_OUTPUTS_KEPT * embed * activation
        + qkv
        + attended
        + (FFN_TENSORS_KEPT + gated) * ffn * activation
    ) * (1.0 if compiled else EAGER_EXTRA)
    if attention == "standard":
        block += heads * context * STANDARD_BYTES_PER_SCORE
    kept = {"none": block, "selective": embed * residual + attended, "full": float(embed * residual)}[checkpointing]
    at_work = 0.0 if checkpointing == "none" else block  # the block being recomputed
    per_token = layers * kept + at_work + 2 * embed * residual  # embedding output and final norm

    logit = LOGIT_COPIES * activation + (0 if compiled else EAGER_LOGIT_FLOAT32_COPIES * 4)
    # Sharded weights are gathered for one block at a time while the next one's are on their way, and for the embedding.
    gathered = parameters if shards == 1 else min(parameters, 2 * parameters // layers + vocab_rows * embed)
    return MemoryEstimate(
        weights=parameters * weight // shards + gathered * (copy if shards == 1 or copy else weight),
        gradients=parameters * weight // shards,
        optimizer=ADAMW_STATES * parameters * weight // shards,
        activations=int(tokens * per_token),
        logits=tokens * vocab_rows * logit,
    )


def choose_micro_batch(
    samples: int, free_bytes: int, estimate: Callable[[int], MemoryEstimate], cap: int = MICRO_BATCH_CAP
) -> tuple[int, int]:
    """(micro-batch, batches accumulated) for `samples` samples a device and optimiser step.

    The largest divisor of `samples`, at most `cap`, whose estimate fits in FREE_SHARE of free_bytes.
    estimate: micro-batch -> MemoryEstimate. Raises UserError where even one sample does not fit.
    """
    if samples < 1:
        raise UserError(f"a device needs at least 1 sample a step, got {samples}")
    allowed = FREE_SHARE * free_bytes
    for micro_batch in range(min(samples, cap), 0, -1):
        if samples % micro_batch == 0 and estimate(micro_batch).total <= allowed:
            return micro_batch, samples // micro_batch
    one = estimate(1)
    raise UserError(
        f"one sample needs an estimated {one.total / GIB:.1f} GiB ({one.activations / GIB:.1f} activations,"
        f" {one.logits / GIB:.1f} logits, {(one.weights + one.gradients + one.optimizer) / GIB:.1f} weights with their"
        f" gradients and optimiser states) but {allowed / GIB:.1f} GiB ({FREE_SHARE:.0%} of {free_bytes / GIB:.1f} GiB"
        " free) may be used; choose a shorter context, a smaller model, attention=flash or trainer.strategy=fsdp on"
        " more devices"
    )
