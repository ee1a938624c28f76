"""Attention as plain values: its FLOPs and memory, from its sizes alone.

Letters: H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashtrain.errors import UserError, at_least
from flashtrain.models.key_value_cache import LayerCache
from flashtrain.models.mixer import MixerMemory, Rotary
from flashtrain_kernels.arguments import MAX_HEAD_DIM

if TYPE_CHECKING:
    from flashtrain.models.attention import Attention

# S x S attention: float32 scores and softmax, and their half-precision copies, of each head.
# "masked": torch's SDPA with a mask of documents, which is stored once for all heads, in float32
# and for a moment as booleans.
STANDARD_BYTES_PER_SCORE, MASK_BYTES_PER_SCORE = 8, 5
QUERY_GRADIENT_BYTES = 4  # the kernels add up dQ in float32, at head dimensions up to 128
# Up to which a part of dK and dV is one of few tokens; of all parts.
FEW_BYTES, PART_BYTES = 33 << 20, 256 << 20


@dataclass(frozen=True)
class AttentionSpec:
    """The sizes and rules of a self-attention: the MixerSpec whose module is Attention."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # head dimension of the values; None: head_dim
    window: int | None = None  # tokens that a token sees, itself included; None: all
    # tokens of a chunk, which see their own chunk alone (Llama 4, TransNormer); None: no chunks.
    chunk: int | None = None
    rotary: bool = False  # whether queries and keys are rotated by their positions
    # Whether the backward needs only the rotated queries and keys, not those before.
    rotated_alone: bool = False

    kind: ClassVar[str] = "attention"
    crosses_devices: ClassVar[str | None] = "attention"
    any_mask: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("window", self.window, 1)

    @classmethod
    def of_pattern(cls, value: str | None, attention: AttentionSpec) -> AttentionSpec:
        return attention

    def make(self, embed: int, *, rotary: Rotary | None, **options: Any) -> Attention:
        from flashtrain.models.attention import Attention

        if self.value_dim not in (None, self.head_dim):
            raise UserError(
                f"attention with value_dim={self.value_dim}: "
                "flashtrain's own decoders have none. Use recipe=hf."
            )
        made = rotary(self.head_dim) if self.rotary and rotary is not None else None
        return Attention(
            embed, self.heads, self.kv_heads, rotary=made, window=self.window, **options
        )

    def new_cache(self, tokens: int) -> LayerCache:
        return LayerCache(tokens, self.window)

    @property
    def cache_width(self) -> int | None:
        """The numbers of a token in a cache whose rows decode together; None: they cannot."""
        # A subclass makes another module, which may read its cache otherwise.
        plain = type(self) is AttentionSpec and self.chunk is None
        served = (self.value_dim or 0) <= self.head_dim <= MAX_HEAD_DIM
        return self.kv_heads * (self.head_dim + self._value_dim) if served and plain else None

    def flops(self, context: int) -> float:
        """Return a token's FLOPs of scores and weighted sums, forward and backward: 12 H D times
        the mean number of keys that it sees (Chowdhery et al. 2022, appendix B)."""
        return 6.0 * self.heads * (self.head_dim + self._value_dim) * self.seen(context)

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self.head_dim

    def seen(self, context: int) -> float:
        """Return the mean number of keys that a token of a sequence of `context` tokens
        sees, under a causal rule."""
        if self.chunk is not None and self.chunk < context:
            return self.chunk / 2
        if self.window is not None and self.window < context:
            return self.window * (1 - self.window / (2 * context))
        return context / 2

    def memory(self, *, tokens: int, context: int, activation: int, attention: str) -> MixerMemory:
        query, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out, values = self.heads * self._value_dim, self.kv_heads * self._value_dim
        unrotated = self.rotary and not self.rotated_alone
        attended = out * activation + 4 * self.heads  # output and float32 LSE
        scores = {"standard": self.heads * STANDARD_BYTES_PER_SCORE, "masked": MASK_BYTES_PER_SCORE}
        # The kernels' float32 parts of dK and dV (splits_of_group): of single heads if tokens
        # are few, else of four.
        group, part = max(1, query // kv_width), 8 * tokens * kv_width
        split = group if part < FEW_BYTES else -(-group // 4)
        parts = (
            split * part if split > 1 and (part < FEW_BYTES or split * part <= PART_BYTES) else 0
        )
        return MixerMemory(
            inputs=(query + kv_width + values + unrotated * (query + kv_width)) * activation,
            result=attended,
            gradients=query * activation,
            sums=query * QUERY_GRADIENT_BYTES,
            scores=context * scores.get(attention, 0),
            # Selective checkpointing saves nothing of standard attention: its S x S
            # matrices are too large.
            selective=0 if attention == "standard" else attended,
            temporary=parts,
        )
