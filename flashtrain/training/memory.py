"""Estimate the GPU memory of a decoder's training step, from the model's sizes alone.

The estimate errs on the high side; its constants are calibrated against measured peaks.
Letters: B micro-batch, S sequence, E embedding width, F feed-forward width, H query heads, K
key/value heads, D head dimension, V rows of the embedding table, P parameters, T = B*S tokens.
Encoders are in encoder_memory.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashtrain.models.activation_checkpointing import PINNED_BYTES, MemorySavings
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import ExpertsSpec, LayerSpec, mixers
from flashtrain.training.master_weights import GRADIENT_CHUNK
from flashtrain_kernels.loss_head import default_chunk

GIB = 2**30

# Bytes of one element, by precision: (weight, the copy of it that matmuls read, activation).
PRECISIONS: dict[str, tuple[int, int, int]] = {
    "32-true": (4, 0, 4),
    # Autocast holds the half-precision copies of weights until the backward has used them.
    "bf16-mixed": (4, 2, 2),
    "16-mixed": (4, 2, 2),
    "bf16-true": (2, 0, 2),
    "64-true": (8, 0, 8),
}
RESIDUAL_BYTES = 4  # autocast leaves the residual stream in float32
ADAMW_STATES = 2  # first and second moment, each in the precision of the weights that are updated

# Tensors of width F that one block saves for its backward:
FFN_TENSORS_SAVED = 2  # before and after the activation function
# Without torch.compile intermediate results of norms, activation and casts are saved too.
EAGER_EXTRA = 1.35
# Gradients that are live at the same time in one block's backward, in units of E (or F) per token:
RESIDUAL_GRADIENTS = 2  # of the block's output, and of the branch's input before they are added
# Of the activation's output and input; compiled, GELU's derivative is part of the product: one.
FFN_GRADIENTS = 2
ADAPTER_TENSORS = 1  # of width F: the adapter's output, in addition to the frozen matrix's
# Of a feed-forward chunk: output and input of the activation, and their gradients.
CHUNK_TENSORS = 4
GATED_CHUNK_TENSORS = 7  # of a gated chunk differentiated by autograd; our operator reuses them
HEAD_STATES = 2  # the output head's input and its gradient

BYTES_OF_4_BITS = 0.5 + 1 / 64  # with a scale of a byte for 64 numbers
# Bytes of weights, as gathered, that FSDP2 gathers at once if a block has fewer. Every gathering is
# a break in compiled code, and NCCL takes multiprocessors from the kernels that it runs beside.
# GPT-2 124M on four H200s: 140 ms a step by blocks, 119 ms at once
# (recipes/results/gpt2-four-gpus-h200.json).
GROUP_BYTES = 256 << 20
FIXED_BYTES = int(0.5 * GIB)  # CUDA context, cuBLAS workspaces, the allocator's rounding
FREE_SHARE = 0.9  # of the free memory that the estimate may fill


@dataclass(frozen=True)
class Growth:
    """How the memory of gradients grows during a backward, if a step begins without gradients
    (zero_grad(set_to_none=True))."""

    # Number of blocks; in each block's backward an equal part of the other gradients is allocated.
    layers: int
    head: int  # bytes of gradients allocated before the backward of the blocks
    embedding: int  # bytes of gradients allocated after the backward of the blocks
    at_embedding: int  # bytes of temporary buffers while the gradients of `embedding` are allocated


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of one device in a training step, in bytes; `logits`, `block` and `updating`
    are never allocated at the same time."""

    weights: int  # the weights, and the half-precision copies of them that matrix products read
    gradients: int  # of all trained weights
    optimizer: int  # the optimizer's states and float32 copies of weights
    activations: int  # what the forward saves for the backward
    logits: int  # temporary buffers of the output head with its loss
    other: int = FIXED_BYTES  # libraries (the CUDA context) and a reserve
    # Temporary buffers of one block's backward: its gradients and recomputed activations.
    block: int = 0
    host: int = 0  # pinned main memory for offloaded activations, not in the total
    # The part of `block` for data exchanged between devices that share a sequence.
    exchange: int = 0
    updating: int = 0  # temporary buffers of the optimizer's step
    # How gradients grow in the backward; None: all of them are always allocated.
    growth: Growth | None = None

    @property
    def total(self) -> int:
        """The estimated peak of device memory in bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return {what the memory is for: bytes} at the peak; the values add up to the peak."""
        gradients, activations, temporary = max(self._moments(), key=sum)
        return {
            "weights": self.weights,
            "gradients": gradients,
            "optimizer": self.optimizer,
            "activations": activations,
            "temporary buffers": temporary,
            "libraries and reserve": self.other,
        }

    def _moments(self) -> list[tuple[int, int, int]]:
        """Return (gradients, saved activations, temporary buffers) in bytes at each point of a step
        at which memory can be at its peak."""
        # Between these points gradients grow, and activations shrink, at an even rate
        # from block to block.
        grown, update = self.growth, (self.gradients, 0, self.updating)
        if grown is None:
            return [(self.gradients, self.activations, max(self.logits, self.block)), update]
        of_block = (self.gradients - grown.head - grown.embedding) // grown.layers
        return [
            (0, self.activations, self.logits),
            (grown.head + of_block, self.activations, self.block),
            (self.gradients - grown.embedding, self.activations // grown.layers, self.block),
            (self.gradients, 0, grown.at_embedding),
            update,
        ]


@dataclass(frozen=True)
class Blocks:
    """The properties of a model's blocks on which its memory depends."""

    embed: int  # embedding width, E
    layers: Sequence[LayerSpec]
    dropout: bool = False  # whether the blocks have dropout, whose masks are saved
    # Type of the residual stream under autocast: float32, or "compute": half precision.
    residual: str = "weights"
    largest: int = 0  # parameters of the largest block, where blocks differ; 0: their mean
    # Whether our operators compute our feed-forwards: not with adapters or float8, without chunks.
    plain: bool = True


def estimate_memory(
    parameters: int,
    blocks: Blocks,
    *,
    vocab_rows: int,
    context: int,
    micro_batch: int,
    savings: MemorySavings,
    frozen: int = 0,
    quantized: int = 0,
    outside: int | None = None,
    states: str = "full",
    precision: str = "bf16-mixed",
    compiled: bool = True,
    attention: str = "flash",
    master_weights: bool = False,
    shards: int = 1,
    context_degree: int = 1,
    exchange: int = 0,
    state_exchange: int = 0,
    state_saved: int = 0,
    gradients_stay: bool = False,
    kernels: bool = True,
) -> MemoryEstimate:
    """Estimate the memory of one training step of a decoder with AdamW, in bytes on one device.

    Args:
        parameters: number of parameters, including frozen ones.
        blocks: the decoder's blocks.
        vocab_rows, context, micro_batch: rows of the embedding table, tokens of
            a sequence, sequences.
        savings: activation checkpointing, offloading, and feed-forward and loss in chunks.
        frozen: number of frozen parameters (requires_grad is False), stored in half precision if
            `precision` uses it.
        quantized: number of frozen parameters that are stored in 4 bits.
        outside: number of parameters outside the blocks; None: those of the embedding table.
        states: how the optimizer's moments are stored: "full", "8bit", or "host" (in main memory).
        precision: a key of PRECISIONS.
        compiled: whether torch.compile fuses the blocks' operations.
        attention: "standard" adds its S x S matrices, "masked" the S x S mask.
        master_weights: float32 copies of half-precision weights; the optimizer's states
            then belong to the copies.
        shards: devices among which weights, gradients and optimizer states are sharded (FSDP2).
        context_degree: devices that share each sequence.
        exchange: bytes that one layer of attention needs while these devices exchange its data,
            with the kernels' sums.
        state_exchange, state_saved: bytes that one layer of states needs for those that these
            devices pass, in its backward, and from its forward on.
        gradients_stay: whether gradients are always allocated (gradient accumulation, DDP's
            buckets); otherwise a step begins without any, as TrainingTask's does.
        kernels: whether a kernel writes the gradients of the logits over the logits; without it (on
            a CPU) torch makes two copies of them.
    """
    weight, copy, activation = PRECISIONS[precision]
    layers, embed = len(blocks.layers), blocks.embed
    residual_bytes = RESIDUAL_BYTES if copy and blocks.residual == "weights" else activation
    tokens = micro_batch * -(-context // context_degree)
    stream, operators = embed * residual_bytes, compiled and blocks.plain
    savings = savings if blocks.plain else replace(savings, ffn_chunk=None)
    saved, block = 0.0, 0
    numbered = enumerate(blocks.layers)
    kinds = Counter((layer, savings.of_layer(number)) for number, layer in numbered)
    for (layer, own), count in kinds.items():
        gated, passes = layer.feed_forward.gated, layer.mixer.crosses_devices == "state"
        of_layer, temporary = block_bytes(
            layer,
            blocks,
            tokens=tokens,
            max_seqlen=context,
            stream=stream,
            activation=activation,
            ffn_saved=FFN_TENSORS_SAVED + gated,
            ffn_gradients=FFN_GRADIENTS
            + gated
            - (operators and not gated)
            + (ADAPTER_TENSORS if frozen else 0),
            extra=1.0 if compiled else EAGER_EXTRA,
            savings=own,
            chunk_tensors=GATED_CHUNK_TENSORS
            if gated and layer.feed_forward.by_autograd
            else CHUNK_TENSORS,
            fused=compiled and context_degree == 1,
            # Graphs end around experts, so that these are saved.
            lean=compiled and not isinstance(layer.feed_forward, ExpertsSpec),
            attention=attention,
            exchange=exchange * bool(mixers((layer,), AttentionSpec)) + state_exchange * passes,
            passed=state_saved * passes / tokens,
        )
        saved, block = saved + count * of_layer, max(block, temporary)
    outside = min(parameters, vocab_rows * embed) if outside is None else outside
    of_block, computed = max((parameters - outside) // layers, blocks.largest), copy or weight
    head_tokens = min(tokens, savings.loss_chunk or default_chunk(vocab_rows))
    part = 1 - frozen / parameters  # of the weights that get gradients
    head = int(part * min(vocab_rows * embed, outside))
    # The loss's forward also computes the gradients of the head's weights (in float32) and
    # inputs. The former is then copied to the weights' type, if that is another one, and
    # scaled in the backward.
    gradient = computed if shards > 1 else weight
    of_logits = head_tokens * vocab_rows * activation * (1 if kernels else 3)
    logits = max(of_logits + head * 4, head * ((4 if gradient < 4 else 0) + gradient))
    logits = max(logits, 2 * head * gradient) + HEAD_STATES * tokens * embed * activation
    masters = master_weights and weight < 4
    each_state = {"full": 4 if masters else weight, "8bit": 1, "host": 0}[states]
    updated = ADAMW_STATES * each_state + (4 if masters and states != "host" else 0)
    trained, of_frozen = parameters - frozen, 2 if copy or weight < 4 else weight
    stored = trained * weight + (frozen - quantized) * of_frozen + int(quantized * BYTES_OF_4_BITS)
    if shards > 1 and context_degree == 1:  # small blocks are gathered in groups
        of_block *= min(layers, -(-GROUP_BYTES // max(1, of_block * computed)))
    # Unsharded weights in the compute type: those of one block, of the next block that is
    # being gathered, and of the embedding. Without sharding, autocast holds copies of all
    # weights: until the loss is computed (without torch.compile), and for the backward of
    # whatever is not recomputed.
    gathered, of_embedding = 2 * of_block + outside, int(part * outside * weight)
    if shards == 1:
        some = savings.checkpointing == "none" or savings.layers is not None
        gathered = trained if some or not compiled else min(trained, gathered)
        # 0 for tied weights: the embedding's gradient is added to the head's.
        of_embedding -= head * weight
        at_embedding = 0 if of_embedding >= head * weight else head * weight
        growth = Growth(layers, head * weight, of_embedding, at_embedding)
    else:
        gathered = min(parameters, gathered)
        block += of_block * computed  # the buffer that receives the next block's weights
        # Gradients before the reduce-scatter: the head's, one block's, and the latter's
        # copy that is sent. At the end those outside the blocks, when no block's weights
        # are gathered any more.
        sent = 4 if copy else weight
        block += head * computed + int(part * of_block * (computed + sent))
        at_embedding = int(part * outside * (computed + sent)) - gathered * computed
        growth = Growth(layers, 0, of_embedding // shards, max(0, at_embedding))
    return MemoryEstimate(
        weights=stored // shards + gathered * (copy if shards == 1 else computed),
        gradients=trained * weight // shards,
        optimizer=updated * trained // shards,
        activations=int(tokens * (saved + 2 * stream)),  # embedding output and final norm too
        logits=logits,
        block=block,
        exchange=max(exchange, state_exchange),
        host=layers * host_bytes(tokens * stream) if savings.offload else 0,
        updating=4 * max(head, min(trained, GRADIENT_CHUNK)) if masters and states != "host" else 0,
        growth=None if gradients_stay else growth,
    )


def block_bytes(
    layer: LayerSpec,
    blocks: Blocks,
    *,
    tokens: int,
    max_seqlen: int,
    stream: int,
    activation: int,
    ffn_saved: int,
    ffn_gradients: int,
    extra: float,
    savings: MemorySavings,
    fused: bool,
    attention: str,
    lean: bool = False,
    exchange: int = 0,
    passed: float = 0.0,
    chunk_tensors: int = CHUNK_TENSORS,
) -> tuple[float, int]:
    """Estimate the memory of one block's activations.

    Args:
        layer, blocks: the block's layer, and the model's Blocks.
        tokens, max_seqlen: tokens of a micro-batch, and of its longest sequence.
        stream, activation: bytes of one token's residual stream, and of one
            element of an activation.
        ffn_saved, ffn_gradients: number of tensors as wide as the feed-forward (F) that are saved,
            and number of those that the backward computes.
        extra: factor for intermediate results that no compiler fuses.
        savings: activation checkpointing, offloading, and the feed-forward in chunks.
        fused: whether attention is compiled together with the rest of the block.
        attention, exchange: as in estimate_memory.
        lean: whether compile_lean compiles the block.
        passed: bytes of one token that the mixer saves for states that devices pass.
        chunk_tensors: number of tensors as wide as the feed-forward that one chunk of it needs.

    Returns:
        (bytes saved for the backward for each token, bytes of temporary buffers in the block's
        backward for the whole micro-batch).
    """
    embed = blocks.embed
    ffn = layer.feed_forward.width_of_token
    dropped = blocks.dropout * blocks.embed
    mixer = layer.mixer.memory(
        tokens=tokens, context=max_seqlen, activation=activation, attention=attention
    )
    assert mixer is not None  # of a model with other mixers the memory is measured
    chunk = (
        savings.ffn_chunk if savings.ffn_chunk is not None and savings.ffn_chunk < tokens else None
    )

    # One token's bytes in each half of a block, in addition to the block's input: the norm's output
    # (and its input in the feed-forward) and the dropout mask of one byte an element.
    normalized = embed * activation
    wide = 0.0 if chunk else ffn_saved * ffn * activation * extra
    mixer_half = (normalized + mixer.inputs + mixer.result) * extra + dropped + mixer.scores
    mixer_half += passed
    ffn_half = (stream + normalized) * extra + dropped + wide
    whole = stream * extra + mixer_half + ffn_half
    # What compile_lean computes again: the outputs of norms before the mixer and the feed-forward,
    # and a gated activation's product. (GELU's output is that of an operator of ours.)
    norm_again = normalized if lean and layer.norms == "pre" else 0.0
    product_again = ffn * activation if lean and wide and layer.feed_forward.gated else 0.0
    whole -= 2 * norm_again + product_again
    stored = mixer.selective if savings.checkpointing == "selective" else 0
    saved = {"none": whole, "selective": stream + stored, "full": stream}[savings.checkpointing]

    # One block's backward has two peaks: in the feed-forward, and then in the mixer. What was
    # not saved is recomputed; the mixer's half only when it is needed, if compiled code does
    # not need its result earlier.
    again_in_ffn = again_in_mixer = stream if savings.offload else 0.0
    if savings.checkpointing == "none":
        again_in_ffn, again_in_mixer = norm_again + product_again, norm_again
    else:
        again_in_ffn += ffn_half + (0 if stored and fused else mixer_half - stored)
        again_in_mixer += mixer_half - stored
    gradients = RESIDUAL_GRADIENTS * stream + embed * activation
    in_ffn = 0 if chunk else ffn_gradients * ffn * activation
    # A feed-forward chunk is freed before the mixer begins. During the exchange between devices
    # the gradients of the block's output and of the mixer's result are live, those of queries,
    # keys and values not yet.
    chunks = (chunk or 0) * chunk_tensors * ffn * activation
    at_ffn = int(tokens * (gradients + again_in_ffn + in_ffn)) + chunks
    at_mixer = int(
        tokens * (gradients + again_in_mixer + mixer.inputs + mixer.gradients + mixer.sums)
    )
    at_exchange = int(tokens * (stream + again_in_mixer + mixer.gradients)) + exchange
    return saved - stream * savings.offload, max(
        at_ffn, max(at_mixer, at_exchange) + mixer.temporary
    )


def host_bytes(size: int) -> int:
    """Return the bytes of host memory that an offloaded tensor of `size` bytes takes: torch's
    allocator rounds it up to a power of two."""
    rest = size % PINNED_BYTES
    return size - rest + (1 << (rest - 1).bit_length() if rest else 0)
