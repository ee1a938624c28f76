"""The shape of a decoder: GPT-2's published sizes (Radford et al. 2019) and Llama-style ones of the same sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

from flashtrain.errors import UserError, one_of
from flashtrain.models.attention import check_heads
from flashtrain.models.block import NORMS, check_shape, round_up
from flashtrain.models.feed_forward import ACTIVATIONS
from flashtrain.models.positions import check_rotary, rotary_base_for
from flashtrain.models.trainable import DecoderShape
from flashtrain.settings import options

POSITIONS = get_args(options.Positions)
FAMILIES = ("gpt2", "llama")


class Size(NamedTuple):
    """The layers, heads and width of a named model size."""

    layers: int
    heads: int
    embed: int
    llama_kv_heads: int  # one key/value head per four query heads (five where there are 25)


SIZES = {
    "demo": Size(layers=4, heads=4, embed=128, llama_kv_heads=1),  # about 1M parameters with a byte vocabulary
    "124m": Size(layers=12, heads=12, embed=768, llama_kv_heads=3),
    "355m": Size(layers=24, heads=16, embed=1024, llama_kv_heads=4),
    "774m": Size(layers=36, heads=20, embed=1280, llama_kv_heads=5),
    "1.3b": Size(layers=24, heads=16, embed=2048, llama_kv_heads=4),  # GPT-3 XL's width with heads of 128
    "1.5b": Size(layers=48, heads=25, embed=1600, llama_kv_heads=5),
}


@dataclass(frozen=True)
class GPT2Config(DecoderShape):
    """The configuration of a GPT2; with the weights it is enough to rebuild the model.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        vocab_rows: Rows of the embedding table, at least vocab_size (a multiple of 64 is faster); further rows are
            never predicted.
        context: Longest sequence in tokens, a limit with learned positions only.
        ffn: Width inside the feed-forward.
        dropout: Dropout probability for embeddings, attention weights and both branches of a block.
        rope_base: Base of the rotary angles in the original training.
        rope_factor: How many times longer the context is than in the original training; it raises the base
            (positions.rotary_base_for).

    Raises:
        UserError: Sizes do not fit together, or a name is unknown.
    """

    vocab_size: int
    vocab_rows: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    embed: int
    ffn: int
    positions: str = "learned"
    norm: str = "layernorm"
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    rope_base: float = 10000.0
    rope_factor: float = 1.0

    def __post_init__(self) -> None:
        names = {"positions": POSITIONS, "norm": NORMS, "activation": ACTIVATIONS}
        check_shape(self, ("vocab_size", "context", "layers", "ffn"), names)
        head_dim = check_heads(self.embed, self.heads, self.kv_heads)
        if self.positions == "rotary":
            check_rotary(head_dim, self.rope_base)
            rotary_base_for(self.rope_base, self.rope_factor, head_dim)
        elif self.rope_factor != 1:
            raise UserError(f"rope_factor={self.rope_factor:g} with learned positions. Set positions=rotary.")

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """The width D of one attention head."""
        return self.embed // self.heads

    @property
    def scaled_rope_base(self) -> float:
        """The base of the rotary angles, rope_factor included."""
        return rotary_base_for(self.rope_base, self.rope_factor, self.head_dim)

    @classmethod
    def of_size(
        cls,
        size: str,
        family: str = "gpt2",
        *,
        vocab_size: int,
        context: int,
        vocab_rows: int | None = None,
        positions: str | None = None,
        dropout: float = 0.0,
        rope_base: float | None = None,
        rope_factor: float | None = None,
    ) -> GPT2Config:
        """Make the configuration of a named size; the output head is tied to the embedding table.

        Args:
            size: A name in SIZES, such as "124m".
            family: "gpt2", or "llama" (RMSNorm, SwiGLU, rotary positions, grouped-query, no biases).
            vocab_rows: Rows of the embedding table (None: vocab_size rounded up to a multiple of 64).
            positions: "learned" or "rotary" (None: the family's).
            rope_base, rope_factor: As GPT2Config's, for rotary positions only (None: 10000 and 1).

        Raises:
            UserError: The size or family is unknown, or rope_base or rope_factor is given with learned positions.
        """
        one_of("model size", size, SIZES)
        one_of("model family", family, FAMILIES)
        llama = family == "llama"
        row = SIZES[size]
        positions = positions or ("rotary" if llama else "learned")
        if rope_base is not None and positions != "rotary":
            raise UserError(f"rope_base={rope_base:g} with {positions} positions. Set positions=rotary.")
        return cls(
            vocab_size=vocab_size,
            vocab_rows=round_up(vocab_size, 64) if vocab_rows is None else vocab_rows,
            context=context,
            layers=row.layers,
            heads=row.heads,
            kv_heads=row.llama_kv_heads if llama else row.heads,
            embed=row.embed,
            # SwiGLU has three matrices for GELU's two: 8/3 E instead of 4 E keeps the parameters equal.
            ffn=round_up(math.ceil(row.embed * 8 / 3), 128) if llama else 4 * row.embed,
            positions=positions,
            norm="rmsnorm" if llama else "layernorm",
            activation="swiglu" if llama else "gelu",
            bias=not llama,
            dropout=dropout,
            rope_base=10000.0 if rope_base is None else rope_base,
            rope_factor=1.0 if rope_factor is None else rope_factor,
        )
