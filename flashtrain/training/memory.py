"""What a training step will need of a GPU's memory, from the model's numbers alone.

Language models, and encoders: BERT with any of its heads, and classifiers of sequences. What an encoder keeps for its
backward is counted tensor by tensor, as tests/training/test_encoder_memory.py counts what autograd saves.

An estimate on the safe side, not a measurement: the constants below are kept in one place to be calibrated against
measured peaks. Letters: B micro-batch, S sequence, E embedding width, F feed-forward width, H query heads, V rows of
the embedding table, P parameters, T = B*S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, unknown
from flashtrain.models.memory_savings import HOST_PIECE, MemorySavings
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
QUERY_GRADIENT_BYTES = 4  # the kernels add up dQ in float32
HEAD_STATES = 2  # the output head's input and its gradient
# Of an encoder:
GATED_EXTRA = 2  # beside GELU's two tensors of width F: the up projection is twice as wide, and both halves multiply
OUTSIDE_TENSORS = 1  # the input of the one norm that is in no block, in the weights' type where autocast is on
HEAD_STATES_KEPT = 4  # a head that predicts tokens: input, before and after its activation, after its norm
ATTENTIONS = ("flash", "sdpa", "standard")

BYTES_OF_4_BITS = 0.5 + 1 / 64  # with a scale of a byte for 64 numbers
FIXED_BYTES = int(0.5 * GIB)  # CUDA context, cuBLAS workspaces, the allocator's rounding
FREE_SHARE = 0.9  # of the free memory that the estimate may fill


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device at the peak of a training step, by what they hold.

    activations: kept from forward to backward. logits: what the output head and its loss store at once; block: what
    the backward of one block needs beside the kept (its own activations, where they are computed again, and its
    gradients). These two never live together. host: pinned main memory for offloaded activations, not in the total.
    exchange: the part of block that devices sharing a sequence need for what they send each other.
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

    @property
    def at_work(self) -> int:
        """The larger of the two passing needs: the loss's logits, and one block's backward."""
        return max(self.logits, self.block)

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by what they hold; their sum is the peak."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "at work": self.at_work,
            "other": self.other,
        }

    def lines(self) -> list[str]:
        """The estimate to read: one line for each part, in GiB, and the total."""
        lines = [f"{name:<12}{size / GIB:8.2f} GiB" for name, size in {**self.parts(), "total": self.total}.items()]
        if self.exchange:
            lines.insert(-1, f"{'(exchanged)':<12}{self.exchange / GIB:8.2f} GiB, of what is at work")
        if self.host:
            lines.insert(-1, f"{'(host)':<12}{self.host / GIB:8.2f} GiB")
        return lines


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
    exchange: bytes that a layer's attention holds beside, for what they send each other.
    Raises UserError for an unknown name or a number below 1.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    savings = MemorySavings(checkpointing, offload, ffn_chunk, loss_chunk)
    if attention not in ATTENTIONS:
        raise unknown("attention", attention, ATTENTIONS)
    sizes = {"layers": layers, "context": context, "micro_batch": micro_batch}
    for name, value in {**sizes, "shards": shards, "context_degree": context_degree}.items():
        if value < 1:
            raise UserError(f"{name} must be 1 or more, got {value}")

    weight, copy, activation = PRECISIONS[precision]
    residual_bytes = RESIDUAL_BYTES if copy and residual == "weights" else activation
    tokens = micro_batch * -(-context // context_degree)
    stream = embed * residual_bytes
    kept, block = _block_bytes(
        EncoderShape(layers, embed, heads, ffn, gated, rotary, kv_width=kv_width, query_width=query_width),
        tokens=tokens,
        longest=context,
        stream=stream,
        activation=activation,
        ffn_kept=FFN_TENSORS_KEPT + gated,
        ffn_gradients=FFN_GRADIENTS + gated - (compiled and not gated) + (ADAPTER_TENSORS if frozen else 0),
        extra=1.0 if compiled else EAGER_EXTRA,
        savings=savings,
        compiled=compiled,
        attention=attention,
        exchange=exchange,
    )
    head_tokens = min(tokens, loss_chunk or default_chunk(vocab_rows))
    # The loss computes its gradients to the head's weights (in float32) and inputs along with it.
    part = 1 - frozen / parameters  # of the weights that get gradients
    head_gradients = int(part * vocab_rows * embed * 4) + HEAD_STATES * tokens * embed * activation
    logits = head_tokens * vocab_rows * activation + head_gradients
    masters = master_weights and weight < 4
    each_state = {"full": 4 if masters else weight, "8bit": 1, "host": 0}[states]
    updated = ADAMW_STATES * each_state + (4 if masters and states != "host" else 0)
    trained, of_frozen = parameters - frozen, 2 if copy or weight < 4 else weight
    stored = trained * weight + (frozen - quantized) * of_frozen + int(quantized * BYTES_OF_4_BITS)
    # Weights in the type that is computed in, whole: of one block at a time while the next one's are on their way, and
    # of the embedding. Where nothing is sharded, autocast keeps its copies of all: uncompiled until the loss is there,
    # and for the backward of what is not computed again.
    outside = min(parameters, vocab_rows * embed) if outside is None else outside
    of_block, computed = (parameters - outside) // layers, copy or weight
    gathered = min(parameters if shards > 1 else trained, 2 * of_block + outside)
    if shards == 1 and (checkpointing == "none" or not compiled):
        gathered = trained
    elif shards > 1:
        block += of_block * computed  # the buffer that the next block's are received in
        # Gradients before they are shared out: the head's, a block's, and the latter's copy as it is sent.
        block += int(part * (outside * computed + of_block * (computed + (4 if copy else weight))))
    return MemoryEstimate(
        weights=stored // shards + gathered * (copy if shards == 1 else computed),
        gradients=trained * weight // shards,
        optimizer=updated * trained // shards,
        activations=int(tokens * (layers * kept + 2 * stream)),  # embedding output and final norm too
        logits=logits,
        block=block,
        exchange=exchange,
        host=layers * host_bytes(tokens * stream) if offload else 0,
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
    kept, block = _block_bytes(
        shape,
        tokens=tokens,
        longest=longest,
        stream=stream,
        activation=activation,
        ffn_kept=FFN_TENSORS_KEPT + GATED_EXTRA * shape.gated,
        ffn_gradients=FFN_GRADIENTS + shape.gated,
        extra=EAGER_EXTRA if copy and not compiled else 1.0,  # autocast's casts
        savings=savings,
        compiled=compiled,
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


def _block_bytes(
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
    compiled: bool,
    attention: str,
    exchange: int = 0,
) -> tuple[float, int]:
    """(bytes that one token of one block keeps for the backward, bytes that one block's backward needs of all tokens).

    stream: a token's bytes of the residual stream; activation: of another number. ffn_kept, ffn_gradients: tensors of
    width F, kept and computed in the backward. extra: what is kept where nothing fuses it. exchange: as in
    estimate_memory.
    """
    embed, ffn, gated = shape.embed, shape.ffn, shape.gated
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
        again_in_ffn += ffn_half + (0 if keeps_attention and compiled else attention_again)
        again_in_attention += attention_again
    gradients = RESIDUAL_GRADIENTS * stream + embed * activation
    in_ffn = 0 if chunk else ffn_gradients * ffn * activation
    of_attended = query * (activation + QUERY_GRADIENT_BYTES)
    # A piece of the feed-forward is gone before attention begins. What devices exchange meets the gradients of the
    # block's output and of what attention gave, not yet those of queries, keys and values as the block takes them.
    pieces = (chunk or 0) * (CHUNK_TENSORS + 3 * gated) * ffn * activation
    at_ffn = int(tokens * (gradients + again_in_ffn + in_ffn)) + pieces
    at_attention = int(tokens * (gradients + again_in_attention + qkv + of_attended))
    at_exchange = int(tokens * (stream + again_in_attention + of_attended)) + exchange
    return kept - stream * savings.offload, max(at_ffn, at_attention, at_exchange)


def host_bytes(size: int) -> int:
    """What `size` offloaded bytes take of host memory, whose allocator rounds each piece up to a power of two."""
    rest = size % HOST_PIECE
    return size - rest + (power_of_two(rest) if rest else 0)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
