"""What a training step will need of a GPU's memory, from the model's numbers alone.

Of language models; encoders are in encoder_memory.py.

An estimate on the safe side, not a measurement: the constants below are kept in one place to be calibrated against
measured peaks. Letters: B micro-batch, S sequence, E embedding width, F feed-forward width, H query heads, V rows of
the embedding table, P parameters, T = B*S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.models.memory_savings import HOST_PIECE, MemorySavings
from flashtrain.training.optimizers import COPIED_AT_ONCE
from flashtrain_kernels.loss_head import default_chunk

GIB = 2**30

# Bytes of one element, by precision: (weight, the copy of it that matrix products read, activation).
PRECISIONS: dict[str, tuple[int, int, int]] = {
    "32-true": (4, 0, 4),
    "bf16-mixed": (4, 2, 2),  # autocast keeps the half-precision copies of the weights until the backward has used them
    "16-mixed": (4, 2, 2),
    "bf16-true": (2, 0, 2),
    "64-true": (8, 0, 8),
}
RESIDUAL_BYTES = 4  # autocast leaves the residual stream in float32
ADAMW_STATES = 2  # first and second moment, each in the precision of the weights that are updated

# Tensors of width F that one block keeps for its backward:
FFN_TENSORS_KEPT = 2  # before and after the activation function
EAGER_EXTRA = 1.35  # without torch.compile the intermediate results of norms, activation and casts are kept as well
STANDARD_BYTES_PER_SCORE = 8  # S x S attention: float32 scores and softmax, and their half-precision copies
# Gradients that live beside them while one block goes backward, in units of E (or F) per token:
RESIDUAL_GRADIENTS = 2  # of the block's output, and of the branch's input before they are added
FFN_GRADIENTS = 2  # of the activation's output and input; compiled, GELU's derivative is part of the product: one
ADAPTER_TENSORS = 1  # of width F: what an adapter adds, beside what the frozen matrix gives
CHUNK_TENSORS = 4  # a piece of the feed-forward: output and input of the activation, and their gradients
GATED_CHUNK_TENSORS = 7  # of a gated one, where autograd goes through it; our operator reuses them
QUERY_GRADIENT_BYTES = 4  # the kernels add up dQ in float32
HEAD_STATES = 2  # the output head's input and its gradient

BYTES_OF_4_BITS = 0.5 + 1 / 64  # with a scale of a byte for 64 numbers
FIXED_BYTES = int(0.5 * GIB)  # CUDA context, cuBLAS workspaces, the allocator's rounding
FREE_SHARE = 0.9  # of the free memory that the estimate may fill


@dataclass(frozen=True)
class Growth:
    """How the gradients of a step come where none are left of the step before.

    head: bytes of those that are there before the blocks' backward; embedding: of those that come after it, when
    at_embedding bytes are at work. The rest comes evenly with the layers.
    """

    layers: int
    head: int
    embedding: int
    at_embedding: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device in a training step, by what they hold.

    gradients: all, as the step takes them. activations: kept from forward to backward. logits: what the output head
    and its loss store at once; block: what the backward of one block needs beside the kept (its own activations, where
    they are computed again, and its gradients); updating: what the optimiser's step does. Of these three one is there
    at a time. growth: None where all gradients are there all the time. host: pinned main memory for offloaded
    activations, not in the total. exchange: the part of block that devices sharing a sequence need for what they send
    each other.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    other: int = FIXED_BYTES
    block: int = 0
    host: int = 0
    exchange: int = 0
    updating: int = 0
    growth: Growth | None = None

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes at the peak by what they hold; their sum is the peak."""
        gradients, activations, at_work = max(self._moments(), key=sum)
        return {
            "weights": self.weights,
            "gradients": gradients,
            "optimizer": self.optimizer,
            "activations": activations,
            "at work": at_work,
            "other": self.other,
        }

    def _moments(self) -> list[tuple[int, int, int]]:
        """(gradients, kept activations, at work) of a step's moments, one of which is the peak: gradients come block by
        block while what the blocks kept goes, so that in between both change at an even rate."""
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
    query_width: int | None = None,
    gated: bool = False,
    frozen: int = 0,
    quantized: int = 0,
    outside: int | None = None,
    states: str = "full",
    precision: str = "bf16-mixed",
    checkpointing: str = "none",
    offload: bool = False,
    ffn_chunk: int | None = None,
    loss_chunk: int | None = None,
    compiled: bool = True,
    attention: str = "flash",
    residual: str = "weights",
    rotary: bool = False,
    master_weights: bool = False,
    shards: int = 1,
    context_degree: int = 1,
    exchange: int = 0,
    gradients_stay: bool = False,
    pieces_by_autograd: bool = False,
) -> MemoryEstimate:
    """Memory of one training step with AdamW, in bytes on one device.

    parameters: P, all of them; frozen: of these, the ones that get no gradient, in half precision where any is computed
    in, and `quantized` of them in 4 bits. outside: those of no block (None: V*E). states: of the optimiser, "full",
    "8bit" or on the "host". kv_width: K*D of grouped-query attention, query_width: H*D (None: E). gated: a SwiGLU
    feed-forward, which keeps one tensor of width F more. checkpointing, offload, ffn_chunk, loss_chunk: as in
    MemorySavings. attention: "standard" adds its S x S matrices. residual: "weights" or "compute", as GPT2's.
    master_weights: float32 copies of half-precision weights, to which the optimiser's states then belong. rotary:
    positions turn queries and keys, whose turned copies are kept beside what they were made from: the projection that
    the values lie in too, or a norm's input. shards: devices that weights, gradients and optimiser states are divided
    among (FSDP2). context_degree: devices that share each sequence, so that one computes a part of its tokens.
    exchange: bytes that a layer's attention holds beside, for what they send each other. gradients_stay: all are there
    at any time, added up over micro-batches or in DDP's buckets; else a step begins with none, as TrainingTask's does.
    pieces_by_autograd: of the feed-forward, not by our operator.
    """
    savings = MemorySavings(checkpointing, offload, ffn_chunk, loss_chunk)
    weight, copy, activation = PRECISIONS[precision]
    residual_bytes = RESIDUAL_BYTES if copy and residual == "weights" else activation
    tokens = micro_batch * -(-context // context_degree)
    stream = embed * residual_bytes
    kept, block = block_bytes(
        EncoderShape(layers, embed, heads, ffn, gated, rotary, kv_width=kv_width, query_width=query_width),
        tokens=tokens,
        longest=context,
        stream=stream,
        activation=activation,
        ffn_kept=FFN_TENSORS_KEPT + gated,
        ffn_gradients=FFN_GRADIENTS + gated - (compiled and not gated) + (ADAPTER_TENSORS if frozen else 0),
        extra=1.0 if compiled else EAGER_EXTRA,
        savings=savings,
        chunk_tensors=GATED_CHUNK_TENSORS if gated and pieces_by_autograd else CHUNK_TENSORS,
        fused=compiled and context_degree == 1,
        attention=attention,
        exchange=exchange,
    )
    outside = min(parameters, vocab_rows * embed) if outside is None else outside
    of_block, computed = (parameters - outside) // layers, copy or weight
    head_tokens = min(tokens, loss_chunk or default_chunk(vocab_rows))
    part = 1 - frozen / parameters  # of the weights that get gradients
    head = int(part * min(vocab_rows * embed, outside))
    # The loss computes its gradients to the head's weights (in float32) and inputs along with it. The former is then
    # copied in the weights' type, where that is another, and in the backward scaled.
    gradient = computed if shards > 1 else weight
    logits = max(head_tokens * vocab_rows * activation + head * 4, head * ((4 if gradient < 4 else 0) + gradient))
    logits = max(logits, 2 * head * gradient) + HEAD_STATES * tokens * embed * activation
    masters = master_weights and weight < 4
    each_state = {"full": 4 if masters else weight, "8bit": 1, "host": 0}[states]
    updated = ADAMW_STATES * each_state + (4 if masters and states != "host" else 0)
    trained, of_frozen = parameters - frozen, 2 if copy or weight < 4 else weight
    stored = trained * weight + (frozen - quantized) * of_frozen + int(quantized * BYTES_OF_4_BITS)
    # Weights in the type that is computed in, whole: of one block at a time while the next one's are on their way, and
    # of the embedding. Where nothing is sharded, autocast keeps its copies of all: uncompiled until the loss is there,
    # and for the backward of what is not computed again.
    gathered, of_embedding = 2 * of_block + outside, int(part * outside * weight)
    if shards == 1:
        gathered = trained if checkpointing == "none" or not compiled else min(trained, gathered)
        of_embedding -= head * weight  # nothing where both are one matrix, to whose gradient the embedding's is added
        at_embedding = 0 if of_embedding >= head * weight else head * weight
        growth = Growth(layers, head * weight, of_embedding, at_embedding)
    else:
        gathered = min(parameters, gathered)
        block += of_block * computed  # the buffer that the next block's are received in
        # Gradients before they are shared out: the head's, a block's, and the latter's copy as it is sent; at the end
        # those of what is in no block, when no block's weights are gathered any more.
        sent = 4 if copy else weight
        block += head * computed + int(part * of_block * (computed + sent))
        at_embedding = int(part * outside * (computed + sent)) - gathered * computed
        growth = Growth(layers, 0, of_embedding // shards, max(0, at_embedding))
    return MemoryEstimate(
        weights=stored // shards + gathered * (copy if shards == 1 else computed),
        gradients=trained * weight // shards,
        optimizer=updated * trained // shards,
        activations=int(tokens * (layers * kept + 2 * stream)),  # embedding output and final norm too
        logits=logits,
        block=block,
        exchange=exchange,
        host=layers * host_bytes(tokens * stream) if offload else 0,
        updating=4 * max(head, min(trained, COPIED_AT_ONCE)) if masters and states != "host" else 0,
        growth=None if gradients_stay else growth,
    )


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that count. gated: a feed-forward of two inner matrices. rotary: positions turn queries and keys.

    dropout: whether any is in force. residual: "weights" or "compute", as BertEncoder's. kv_width, query_width: None
    for E.
    """

    layers: int
    embed: int
    heads: int
    ffn: int
    gated: bool = False
    rotary: bool = False
    dropout: bool = False
    residual: str = "weights"
    kv_width: int | None = None
    query_width: int | None = None


def block_bytes(
    shape: EncoderShape,
    *,
    tokens: int,
    longest: int,
    stream: int,
    activation: int,
    ffn_kept: int,
    ffn_gradients: int,
    extra: float,
    savings: MemorySavings,
    fused: bool,
    attention: str,
    exchange: int = 0,
    chunk_tensors: int = CHUNK_TENSORS,
) -> tuple[float, int]:
    """(bytes that one token of one block keeps for the backward, bytes that one block's backward needs of all tokens).

    stream: a token's bytes of the residual stream; activation: of another number. ffn_kept, ffn_gradients: tensors of
    width F, kept and computed in the backward. extra: what is kept where nothing fuses it. fused: attention is compiled
    along with the rest. exchange: as in estimate_memory. chunk_tensors: of width F, of a piece of the feed-forward.
    """
    embed, ffn = shape.embed, shape.ffn
    kv_width = embed if shape.kv_width is None else shape.kv_width
    query = embed if shape.query_width is None else shape.query_width
    dropped = shape.dropout * embed
    chunk = savings.ffn_chunk if savings.ffn_chunk is not None and savings.ffn_chunk < tokens else None

    # One token's bytes in one block: of its two halves, what a backward needs beside the block's input: its norm's
    # output (and the feed-forward's its norm's input), dropout's mask of one byte an element.
    qkv = (query + 2 * kv_width + shape.rotary * (query + kv_width)) * activation
    attended = query * activation + 4 * shape.heads  # output and float32 LSE
    normalized = embed * activation
    scores = shape.heads * longest * STANDARD_BYTES_PER_SCORE if attention == "standard" else 0
    wide = 0.0 if chunk else ffn_kept * ffn * activation * extra
    attention_half = (normalized + qkv + attended) * extra + dropped + scores
    ffn_half = (stream + normalized) * extra + dropped + wide
    whole = stream * extra + attention_half + ffn_half
    # Selective checkpointing finds nothing to keep of standard attention but its S x S matrices, and leaves them.
    keeps_attention = savings.checkpointing == "selective" and attention != "standard"
    selective = stream + (attended if keeps_attention else 0)
    kept = {"none": whole, "selective": selective, "full": stream}[savings.checkpointing]

    # One block's backward, at its two peaks: in the feed-forward, and, when that is done, in attention. What was not
    # kept is computed again; attention's half not before its turn where compiled code need not have its result.
    again_in_ffn = again_in_attention = stream if savings.offload else 0.0
    if savings.checkpointing != "none":
        attention_again = attention_half - (attended if keeps_attention else 0)
        again_in_ffn += ffn_half + (0 if keeps_attention and fused else attention_again)
        again_in_attention += attention_again
    gradients = RESIDUAL_GRADIENTS * stream + embed * activation
    in_ffn = 0 if chunk else ffn_gradients * ffn * activation
    of_attended = query * (activation + QUERY_GRADIENT_BYTES)
    # A piece of the feed-forward is gone before attention begins. What devices exchange meets the gradients of the
    # block's output and of what attention gave, not yet those of queries, keys and values as the block takes them.
    pieces = (chunk or 0) * chunk_tensors * ffn * activation
    at_ffn = int(tokens * (gradients + again_in_ffn + in_ffn)) + pieces
    at_attention = int(tokens * (gradients + again_in_attention + qkv + of_attended))
    at_exchange = int(tokens * (stream + again_in_attention + of_attended)) + exchange
    return kept - stream * savings.offload, max(at_ffn, at_attention, at_exchange)


def host_bytes(size: int) -> int:
    """What `size` offloaded bytes take of host memory, whose allocator rounds each piece up to a power of two."""
    rest = size % HOST_PIECE
    return size - rest + (1 << (rest - 1).bit_length() if rest else 0)
