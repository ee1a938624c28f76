"""The shape of a sequence classifier."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, unknown
from flashtrain.models.attention import check_dropout, check_heads
from flashtrain.models.axial_positions import AXIAL_BASE, check_axial
from flashtrain.models.block_patterns import BLOCK, DENSE, PATTERNS, TILED
from flashtrain.models.feed_forward import FEED_FORWARDS
from flashtrain.models.normalization import NORMS
from flashtrain.models.pooling import POOLINGS
from flashtrain.models.positions import check_rotary

INPUTS = ("tokens", "grey", "grey-table")
POSITIONS = ("learned", "rotary", "axial")
GREY_LEVELS = 256


@dataclass(frozen=True)
class ClassifierConfig:
    """Enough, with the weights, to rebuild a Classifier.

    classes: answers. length: tokens of the longest sequence (with rotary and axial positions a training length rather
    than a limit). vocab_size: rows of the token table, padding included. inputs: what a token is:
      "tokens"      a number below vocab_size, looked up in a table;
      "grey"        a grey level 0..255, as (level / 255 - 0.5) / 0.5 times one learned vector plus another: near levels
                    mean nearly the same, and levels that no training image had mean something, which matters
                    where a curriculum's images differ in contrast;
      "grey-table"  a grey level looked up in a table of 256.
    positions: "learned", "rotary" (by the place in the sequence), "axial" (rotary by row and column of a square image
    of `side` pixels). rope_base None: 10000, axial 100. pooling: see Pooling.
    towers: 2 where a sample is two sequences, read by the same encoder; the head sees [a, b, a * b, a - b].
    grey_bins: classes that masked grey levels are predicted in, dividing 256; of tokens, all vocab_size of them, where
    masked ones are to be predicted; 0: no such head.
    pattern, pattern_block, pattern_local, pattern_globals: see BlockPattern; "dense": every token sees every other.
    UserError, when built: sizes that cannot work together, or an unknown name.
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

    def __post_init__(self) -> None:
        for name in ("length", "embed", "layers", "heads", "ffn", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)}. Possible: 1 or more.")
        if self.classes < 2:
            raise UserError(f"{self.classes} classes. Possible: 2 or more.")
        if self.towers not in (1, 2):
            raise UserError(f"{self.towers} towers. Possible: 1 sequence a sample, or 2.")
        check_dropout(self.dropout)
        for kind, given, possible in (
            ("inputs", self.inputs, INPUTS),
            ("positions", self.positions, POSITIONS),
            ("pooling", self.pooling, POOLINGS),
            ("norm", self.norm, NORMS),
            ("activation", self.activation, FEED_FORWARDS),
            ("attention pattern", self.pattern, PATTERNS),
        ):
            if given not in possible:
                raise unknown(kind, given, possible)
        self._check_positions(check_heads(self.embed, self.heads, self.heads))
        if self.pattern in TILED and not self._is_square:
            raise UserError(
                f"attention pattern {self.pattern} for {self.length} tokens and side {self.side}: square images only."
            )
        if self.grey_bins and self.inputs == "tokens":
            if self.towers == 2:
                raise UserError("masked tokens of samples of two sequences. Possible: of samples of one.")
            if self.grey_bins != self.vocab_size:
                raise UserError(
                    f"{self.grey_bins} classes of masked tokens. Possible: all {self.vocab_size} of them, or none."
                )
        elif self.grey_bins and (self.grey_bins < 2 or GREY_LEVELS % self.grey_bins):
            raise UserError(f"{self.grey_bins} bins of grey levels. Possible: a power of two from 2 to 256.")

    def _check_positions(self, head_dim: int) -> None:
        if self.positions == "axial":
            if not self._is_square:
                raise UserError(
                    f"axial positions for {self.length} tokens and side {self.side}. "
                    "Possible: square images, so length = side * side; other sequences take rotary or learned ones."
                )
            check_axial(head_dim, self.angle_base)
        elif self.positions == "rotary":
            check_rotary(head_dim, self.angle_base)

    @property
    def _is_square(self) -> bool:
        return self.side is not None and self.side * self.side == self.length

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def angle_base(self) -> float:
        """The base of the rotary angles."""
        if self.rope_base is not None:
            return self.rope_base
        return AXIAL_BASE if self.positions == "axial" else 10000.0
