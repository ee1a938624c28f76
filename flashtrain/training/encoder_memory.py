"""Estimate the GPU memory of an encoder's training step: BERT with any of its heads,
and sequence classifiers.

Letters as in memory.py. tests/training/test_encoder_memory.py compares the estimate
with what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.training.memory import (
    ADAMW_STATES,
    EAGER_EXTRA,
    FFN_GRADIENTS,
    FFN_TENSORS_SAVED,
    HEAD_STATES,
    PRECISIONS,
    RESIDUAL_BYTES,
    Blocks,
    MemoryEstimate,
    block_bytes,
    host_bytes,
)
from flashtrain_kernels.loss_head import default_chunk

# In addition to GELU's two tensors of width F: the up projection is twice as wide,
# its halves multiply.
GATED_EXTRA = 2
# The input of the one norm that is in no block, in the weights' type where autocast is on.
OUTSIDE_TENSORS = 1
# A head that predicts tokens: input, before and after its activation, after its norm.
HEAD_STATES_SAVED = 4


@dataclass(frozen=True)
class PredictingHead:
    """A head that predicts tokens or grey levels."""

    rows: int  # of its weight matrix, one for each token or grey level
    positions: int  # predicted positions of a micro-batch


def estimate_encoder_memory(
    parameters: int,
    blocks: Blocks,
    *,
    tokens: int,
    max_seqlen: int,
    head: PredictingHead | None = None,
    precision: str = "bf16-mixed",
    savings: MemorySavings | None = None,
    compiled: bool = True,
    attention: str = "flash",
    master_weights: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of one training step with AdamW or LAMB, in bytes on one device.

    Args:
        parameters: P, the number of parameters.
        blocks: the encoder's blocks, which are all alike.
        tokens: T, the tokens that a micro-batch computes, padding included.
        max_seqlen: S, for "standard" attention, which stores a score matrix for each sequence.
        head: the head that predicts tokens; None for a head on pooled states, which
            needs next to nothing.
        precision: a key of PRECISIONS.
        savings: activation checkpointing, offloading and chunks; None: none of them.
        compiled: whether torch.compile fuses the blocks' operations.
        attention: "standard" adds its S x S matrices.
        master_weights: float32 copies of half-precision weights; the optimizer's states
            then belong to the copies.
    """
    savings = savings or MemorySavings()
    weight, copy, activation = PRECISIONS[precision]
    stream = blocks.embed * (
        RESIDUAL_BYTES if copy and blocks.residual == "weights" else activation
    )
    outside = blocks.embed * (RESIDUAL_BYTES if copy else activation)
    layers, gated = len(blocks.layers), blocks.layers[0].feed_forward.gated
    saved, block = block_bytes(
        blocks.layers[0],
        blocks,
        tokens=tokens,
        max_seqlen=max_seqlen,
        stream=stream,
        activation=activation,
        ffn_saved=FFN_TENSORS_SAVED + GATED_EXTRA * gated,
        ffn_gradients=FFN_GRADIENTS + gated,
        extra=EAGER_EXTRA if copy and not compiled else 1.0,  # autocast's casts
        savings=savings,
        fused=compiled,
        attention=attention,
    )
    saved_by_head, at_loss = _of_head(head, blocks.embed, activation, savings.loss_chunk)
    states = (1 + ADAMW_STATES) * 4 if master_weights and weight < 4 else ADAMW_STATES * weight
    return MemoryEstimate(
        weights=parameters * (weight + copy),
        gradients=parameters * weight,
        optimizer=states * parameters,
        activations=int(tokens * (layers * saved + OUTSIDE_TENSORS * outside)) + saved_by_head,
        logits=at_loss,
        block=block,
        host=layers * host_bytes(tokens * stream) if savings.offload else 0,
    )


def _of_head(
    head: PredictingHead | None, embed: int, activation: int, loss_chunk: int | None
) -> tuple[int, int]:
    """Return (bytes that a predicting head saves for the backward, bytes of temporary buffers of
    its loss)."""
    if head is None:
        return 0, 0
    chunk = min(head.positions, loss_chunk or default_chunk(head.rows))
    # The matrix in the activations' type, its gradient in float32, and the gradient that
    # this one is added to.
    matrices = head.rows * embed * (activation + 8)
    states = HEAD_STATES * head.positions * embed * activation
    return (
        HEAD_STATES_SAVED * head.positions * embed * activation,
        chunk * head.rows * activation + matrices + states,
    )
