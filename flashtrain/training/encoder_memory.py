"""What a training step of an encoder needs of a GPU's memory: BERT with any of its heads, and classifiers of sequences.

As memory.py's estimate of a language model, with the constants of that file: on the safe side, from the model's numbers
alone. What is kept for the backward is counted tensor by tensor, as tests/training/test_encoder_memory.py counts what
autograd saves. T tokens computed at once, S of the longest sequence, E embedding width, F feed-forward width,
H heads, V rows of a head's matrix, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, unknown
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.training.memory import (
    ADAMW_STATES,
    ATTENTIONS,
    CHUNK_TENSORS,
    EAGER_EXTRA,
    FFN_GRADIENTS,
    FFN_TENSORS_KEPT,
    HEAD_STATES,
    PRECISIONS,
    QUERY_GRADIENT_BYTES,
    RESIDUAL_BYTES,
    RESIDUAL_GRADIENTS,
    STANDARD_BYTES_PER_SCORE,
    MemoryEstimate,
    power_of_two,
)
from flashtrain_kernels.loss_head import default_chunk

GATED_EXTRA = 2  # beside GELU's two tensors of width F: the up projection is twice as wide, and both halves multiply
OUTSIDE_TENSORS = 1  # the input of the one norm that is in no block, in the weights' type where autocast is on
HEAD_STATES_KEPT = 4  # a head that predicts tokens: input, before and after its activation, after its norm


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that count. gated: a feed-forward of two inner matrices. rotary: positions turn queries and keys.

    dropout: whether any is in force. residual: "weights" or "compute", as BertEncoder's.
    """

    layers: int
    embed: int
    heads: int
    ffn: int
    gated: bool = False
    rotary: bool = False
    dropout: bool = False
    residual: str = "weights"


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
    UserError: an unknown name, a number below 1.
    """
    savings = savings or MemorySavings()
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if attention not in ATTENTIONS:
        raise unknown("attention", attention, ATTENTIONS)
    for name, value in (("parameters", parameters), ("tokens", tokens), ("longest", longest)):
        if value < 1:
            raise UserError(f"{name} must be 1 or more, got {value}")
    weight, copy, activation = PRECISIONS[precision]
    stream = shape.embed * (RESIDUAL_BYTES if copy and shape.residual == "weights" else activation)
    outside = shape.embed * (RESIDUAL_BYTES if copy else activation)
    chunked = savings.ffn_chunk is not None and savings.ffn_chunk < tokens

    # One token's bytes in one block: of its two halves, what a backward needs beside the block's input: its norm's
    # output (and the feed-forward's its norm's input), dropout's mask of one byte an element. Autocast's casts are kept
    # where nothing fuses them.
    extra = EAGER_EXTRA if copy and not compiled else 1.0
    normalized = shape.embed * activation
    dropped = shape.dropout * shape.embed
    qkv = (3 + 2 * shape.rotary) * shape.embed * activation
    attended = shape.embed * activation + 4 * shape.heads  # output and float32 LSE
    scores = shape.heads * longest * STANDARD_BYTES_PER_SCORE if attention == "standard" else 0
    wide = 0.0 if chunked else (FFN_TENSORS_KEPT + GATED_EXTRA * shape.gated) * shape.ffn * activation * extra
    attention_half = (normalized + qkv + attended) * extra + dropped + scores
    ffn_half = (stream + normalized) * extra + dropped + wide
    keeps_attention = savings.checkpointing == "selective" and attention != "standard"
    selective = stream + (attended if keeps_attention else 0)
    whole = stream * extra + attention_half + ffn_half
    kept = {"none": whole, "selective": selective, "full": stream}[savings.checkpointing]
    kept = 0.0 if savings.offload else kept

    # One block's backward, at its two peaks: in the feed-forward, and, when that is done, in attention. What was not
    # kept is computed again, as memory.py counts it.
    again_in_ffn = again_in_attention = stream if savings.offload else 0.0
    if savings.checkpointing != "none":
        attention_again = attention_half - (attended if keeps_attention and not savings.offload else 0)
        again_in_ffn += ffn_half + (0 if keeps_attention and compiled else attention_again)
        again_in_attention += attention_again
    gradients = RESIDUAL_GRADIENTS * stream + shape.embed * activation
    in_ffn = 0 if chunked else (FFN_GRADIENTS + shape.gated) * shape.ffn * activation
    in_attention = qkv + shape.embed * (activation + QUERY_GRADIENT_BYTES)
    block = gradients + max(again_in_ffn + in_ffn, again_in_attention + in_attention)
    pieces = (CHUNK_TENSORS + 3 * shape.gated) * (savings.ffn_chunk or 0) * shape.ffn * activation if chunked else 0

    kept_by_head, at_loss = _of_head(head, shape.embed, activation, savings.loss_chunk)
    states = (1 + ADAMW_STATES) * 4 if master_weights and weight < 4 else ADAMW_STATES * weight
    return MemoryEstimate(
        weights=parameters * (weight + copy),
        gradients=parameters * weight,
        optimizer=states * parameters,
        activations=int(tokens * (shape.layers * kept + OUTSIDE_TENSORS * outside)) + kept_by_head,
        logits=at_loss,
        block=int(tokens * block) + pieces,
        host=shape.layers * power_of_two(tokens * stream) if savings.offload else 0,
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
