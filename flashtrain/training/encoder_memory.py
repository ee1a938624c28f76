"""What a training step of an encoder will need of a GPU's memory: BERT with any of its heads, classifiers of sequences.

What it keeps for its backward is counted tensor by tensor, as tests/training/test_encoder_memory.py counts what
autograd saves. Letters as in memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.models.memory_savings import MemorySavings
from flashtrain.training.memory import (
    ADAMW_STATES,
    EAGER_EXTRA,
    FFN_GRADIENTS,
    FFN_TENSORS_KEPT,
    HEAD_STATES,
    PRECISIONS,
    RESIDUAL_BYTES,
    EncoderShape,
    MemoryEstimate,
    block_bytes,
    host_bytes,
)
from flashtrain_kernels.loss_head import default_chunk

GATED_EXTRA = 2  # beside GELU's two tensors of width F: the up projection is twice as wide, and both halves multiply
OUTSIDE_TENSORS = 1  # the input of the one norm that is in no block, in the weights' type where autocast is on
HEAD_STATES_KEPT = 4  # a head that predicts tokens: input, before and after its activation, after its norm


@dataclass(frozen=True)
class PredictingHead:
    """A head that predicts tokens, or bins of grey levels: `rows` of its matrix, at `positions` of what is computed."""

    rows: int
    positions: int


def estimate_encoder_memory(
    parameters: int,
    shape: EncoderShape,
    *,
    tokens: int,
    longest: int,
    head: PredictingHead | None = None,
    precision: str = "bf16-mixed",
    savings: MemorySavings | None = None,
    compiled: bool = True,
    attention: str = "flash",
    master_weights: bool = False,
) -> MemoryEstimate:
    """Memory of one training step with AdamW or LAMB, in bytes on one device.

    parameters: P. tokens: T, padding and what is read twice included. longest: S, for "standard" attention, which
    stores a score matrix for each sequence. head: None for a head on pooled states, which needs next to nothing.
    master_weights: float32 copies of half-precision weights, to which the optimiser's states then belong.
    """
    savings = savings or MemorySavings()
    weight, copy, activation = PRECISIONS[precision]
    stream = shape.embed * (RESIDUAL_BYTES if copy and shape.residual == "weights" else activation)
    outside = shape.embed * (RESIDUAL_BYTES if copy else activation)
    kept, block = block_bytes(
        shape,
        tokens=tokens,
        longest=longest,
        stream=stream,
        activation=activation,
        ffn_kept=FFN_TENSORS_KEPT + GATED_EXTRA * shape.gated,
        ffn_gradients=FFN_GRADIENTS + shape.gated,
        extra=EAGER_EXTRA if copy and not compiled else 1.0,  # autocast's casts
        savings=savings,
        fused=compiled,
        attention=attention,
    )
    kept_by_head, at_loss = _of_head(head, shape.embed, activation, savings.loss_chunk)
    states = (1 + ADAMW_STATES) * 4 if master_weights and weight < 4 else ADAMW_STATES * weight
    return MemoryEstimate(
        weights=parameters * (weight + copy),
        gradients=parameters * weight,
        optimizer=states * parameters,
        activations=int(tokens * (shape.layers * kept + OUTSIDE_TENSORS * outside)) + kept_by_head,
        logits=at_loss,
        block=block,
        host=shape.layers * host_bytes(tokens * stream) if savings.offload else 0,
    )


def _of_head(head: PredictingHead | None, embed: int, activation: int, loss_chunk: int | None) -> tuple[int, int]:
    """What a predicting head keeps of its positions, and what its loss stores at once: the logits of one piece, its
    matrix in the activations' type, the matrix's gradient in float32 and what the gradient is added to."""
    if head is None:
        return 0, 0
    chunk = min(head.positions, loss_chunk or default_chunk(head.rows))
    matrices = head.rows * embed * (activation + 8)
    states = HEAD_STATES * head.positions * embed * activation
    return HEAD_STATES_KEPT * head.positions * embed * activation, chunk * head.rows * activation + matrices + states
