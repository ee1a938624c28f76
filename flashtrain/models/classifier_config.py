"""The configuration of a sequence classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashtrain.errors import UserError, at_least, between, one_of
from flashtrain.models.attention import check_heads
from flashtrain.models.block import EPSILON, NORMS, check_config
from flashtrain.models.block_pattern import BLOCK, DENSE, PATTERNS, TILED
from flashtrain.models.feed_forward import ACTIVATIONS
from flashtrain.models.layer_spec import AlikeLayers
from flashtrain.models.positions import AXIAL_BASE, check_rotary

POOLINGS = ("mean", "max", "attention")
INPUTS = ("tokens", "grey")
POSITIONS = ("rotary", "axial", "learned")
GREY_LEVELS = 256


@dataclass(frozen=True)
class ClassifierConfig(AlikeLayers):
    """The configuration of a Classifier; with the weights it is enough to rebuild the model.

    Args:
        classes: Number of classes.
        length: The longest sequence in tokens, a limit with a block pattern only.
        vocab_size: Number of tokens, padding included (rows of the token table).
        inputs: "tokens" (numbers below vocab_size, looked up in a table) or "grey" (grey levels
            0..255 as a value in [-1, 1] times one learned vector plus another, so that levels which
            no training image had mean something, as a curriculum of differing contrasts needs).
        positions: "rotary", "axial" (rotary by row and column of a square image of `side`
            pixels), or "learned" (a vector for each place up to `length`).
        rope_base: Base of the rotary angles (None: 10000, axial 100).
        pooling: How a sequence's states become one vector: their "mean", their component-wise
            "max", or "attention" (sequence_pooling.AttentionPooling).
        towers: 1, or 2 where a sample is two sequences; of their vectors a and b the head
            reads [a, b, a * b, a - b].
        grey_bins: Classes for masked grey levels, a power of two up to 256; for masked tokens
            vocab_size; 0: no such head.
        pattern, pattern_block, pattern_local, pattern_globals: See BlockPattern;
            "dense": every token sees all.

    Raises:
        UserError: Sizes do not fit together, or a name is unknown.
    """

    classes: int
    length: int
    embed: int = 128
    layers: int = 4
    heads: int = 2
    ffn: int = 512
    vocab_size: int = GREY_LEVELS
    inputs: str = "grey"
    positions: str = "axial"
    side: int | None = None
    rope_base: float | None = None
    pooling: str = "max"
    towers: int = 1
    norm: str = "layernorm"
    activation: str = "gelu"
    dropout: float = 0.0
    grey_bins: int = 0
    pattern: str = DENSE
    pattern_block: int = BLOCK
    pattern_local: int = 1
    pattern_globals: int = 1

    bias: ClassVar[bool] = True
    epsilon: ClassVar[float] = EPSILON

    def __post_init__(self) -> None:
        names = {"inputs": INPUTS, "positions": POSITIONS, "pooling": POOLINGS, "norm": NORMS}
        sizes = ("length", "embed", "layers", "heads", "ffn", "vocab_size")
        check_config(self, sizes, {**names, "activation": ACTIVATIONS})
        at_least("classes", self.classes, 2)
        between("towers", self.towers, 1, 2)
        one_of("attention pattern", self.pattern, PATTERNS)
        head_dim = check_heads(self.embed, self.heads, self.heads)
        check_rotary(head_dim, self.angle_base, multiple=4 if self.positions == "axial" else 2)
        square = self.side is not None and self.side * self.side == self.length
        if (self.pattern in TILED or self.positions == "axial") and not square:
            raise UserError(
                f"pattern={self.pattern} and positions={self.positions} with "
                f"length={self.length} and side={self.side}: tiles and axial positions need "
                "square images, length = side * side."
            )
        if self.grey_bins and self.inputs == "tokens":
            if self.towers == 2:
                raise UserError(
                    f"grey_bins={self.grey_bins} predicts masked tokens, which towers=2 "
                    "(samples of two sequences) does not support. Set grey_bins=0 to "
                    "train without that loss."
                )
            if self.grey_bins != self.vocab_size:
                raise UserError(
                    f"grey_bins={self.grey_bins} for masked tokens: "
                    f"expected vocab_size ({self.vocab_size}) or 0."
                )
        elif self.grey_bins and (self.grey_bins < 2 or GREY_LEVELS % self.grey_bins):
            raise UserError(f"grey_bins={self.grey_bins}: expected a power of two from 2 to 256.")

    @property
    def angle_base(self) -> float:
        """The base of the rotary angles: rope_base, or the default for `positions`."""
        if self.rope_base is not None:
            return self.rope_base
        return AXIAL_BASE if self.positions == "axial" else 10000.0
