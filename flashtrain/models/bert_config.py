"""The shape of a BERT: the sizes of Devlin et al. 2019, and a modern encoder of the same sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtrain.errors import UserError, unknown
from flashtrain.models.attention import check_dropout, check_heads
from flashtrain.models.feed_forward import FEED_FORWARDS, GATED
from flashtrain.models.positions import check_rotary

FAMILIES = ("bert", "modern")
POSITIONS = ("learned", "rotary")
NORM_PLACES = ("post", "pre")
BERT_EPSILON = 1e-12


class BertSize(NamedTuple):
    """A row of the size table."""

    layers: int
    heads: int
    embed: int


BERT_SIZES = {
    "tiny": BertSize(layers=2, heads=2, embed=128),  # the smallest of Turc et al. 2019 (arXiv 1908.08962)
    "base": BertSize(layers=12, heads=12, embed=768),
    "large": BertSize(layers=24, heads=16, embed=1024),
}


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder and its heads; enough, with the weights, to rebuild it.

    vocab_size: real tokens, the special ones included. vocab_rows: rows of the embedding table, at least vocab_size;
    the rest stand for no token and are never predicted. context: longest sequence (a limit with learned positions
    only). ffn: width inside the feed-forward. segments: segment embeddings, 0 for none. norm_place: "post" or "pre".
    activation: a name of feed_forward.FEED_FORWARDS. dropout: a probability, of the embeddings, the attention weights
    and both branches of a block. epsilon: of every LayerNorm. masked_head: predicts masked tokens. pooler: the first
    token's state through a layer with tanh. next_sentence: a head on the pooler that tells whether the second segment
    followed the first. UserError, when built: sizes that cannot work together, or an unknown name.
    """

    vocab_size: int
    vocab_rows: int
    context: int
    layers: int
    heads: int
    embed: int
    ffn: int
    segments: int = 2
    positions: str = "learned"
    norm_place: str = "post"
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0
    epsilon: float = BERT_EPSILON
    rope_base: float = 10000.0
    masked_head: bool = True
    pooler: bool = False
    next_sentence: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "ffn"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)}. Possible: 1 or more.")
        if self.vocab_rows < self.vocab_size:
            raise UserError(
                f"vocab_rows {self.vocab_rows} for {self.vocab_size} tokens. Possible: {self.vocab_size} or more."
            )
        if self.segments < 0:
            raise UserError(f"segments {self.segments}. Possible: 0 for none, or how many there are.")
        if not self.epsilon > 0:
            raise UserError(f"epsilon {self.epsilon:g}. Possible: a small positive number (BERT's is 1e-12).")
        check_dropout(self.dropout)
        for kind, given, possible in (
            ("positions", self.positions, POSITIONS),
            ("norm_place", self.norm_place, NORM_PLACES),
            ("activation", self.activation, FEED_FORWARDS),
        ):
            if given not in possible:
                raise unknown(kind, given, possible)
        head_dim = check_heads(self.embed, self.heads, self.heads)
        if self.positions == "rotary":
            check_rotary(head_dim, self.rope_base)
        if self.next_sentence and not (self.pooler and self.segments > 1):
            raise UserError("next_sentence without a pooler or two segments. Possible: pooler and segments=2 with it.")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @classmethod
    def of_size(
        cls,
        size: str,
        family: str = "bert",
        *,
        vocab_size: int,
        context: int = 512,
        vocab_rows: int | None = None,
        dropout: float = 0.0,
        next_sentence: bool = False,
        activation: str | None = None,
    ) -> BertConfig:
        """A row of BERT_SIZES as a family: "bert", or "modern" (pre-norm, rotary positions, GeGLU, no biases).

        vocab_rows None: vocab_size rounded up to a multiple of 64. activation None: the family's own, which for "bert"
        is GELU in its tanh form ("gelu_exact" is what transformers' BERT computes). Modern has segments only with
        next_sentence. Both tie the decoder of the masked head to the token embedding.
        UserError: an unknown size or family.
        """
        if size not in BERT_SIZES:
            raise unknown("model size", size, BERT_SIZES)
        if family not in FAMILIES:
            raise unknown("model family", family, FAMILIES)
        layers, heads, embed = BERT_SIZES[size]
        modern = family == "modern"
        return cls(
            vocab_size=vocab_size,
            vocab_rows=-(-vocab_size // 64) * 64 if vocab_rows is None else vocab_rows,
            context=context,
            layers=layers,
            heads=heads,
            embed=embed,
            # GeGLU has three matrices for GELU's two: 8/3 E instead of 4 E keeps the parameters equal.
            ffn=math.ceil(embed * 8 / 3 / 128) * 128 if modern else 4 * embed,
            segments=2 if next_sentence or not modern else 0,
            positions="rotary" if modern else "learned",
            norm_place="pre" if modern else "post",
            activation=activation or ("geglu" if modern else "gelu"),
            bias=not modern,
            dropout=dropout,
            epsilon=1e-5 if modern else BERT_EPSILON,
            pooler=next_sentence,
            next_sentence=next_sentence,
        )

    def cost_per_token(self, masked_share: float = 0.0) -> float:
        """FLOPs of a token's forward and backward, attention's scores aside; masked_share: of tokens with a label.

        Six for each weight that multiplies it (Chowdhery et al. 2022, appendix B); looking up embeddings costs nothing.
        """
        width = self.embed
        ffn = (3 if self.activation in GATED else 2) * width * self.ffn
        head = masked_share * (width * width + width * self.vocab_size) if self.masked_head else 0.0
        return 6.0 * (self.layers * (4 * width * width + ffn) + head)

    def cost_per_pair(self) -> float:
        """FLOPs, forward and backward, of one query's attention to one key in all layers: two products, three times."""
        return 12.0 * self.layers * self.embed

    def flops(self, lengths: Sequence[int], masked: int = 0) -> float:
        """FLOPs of a batch's forward and backward, from the real lengths of its sequences and its count of labels.

        Padding counts nothing, whether or not it was computed; nor does recomputation. For MFU.
        """
        return self.flops_of(sum(lengths), sum(length * length for length in lengths), len(lengths), masked)

    def flops_of(self, tokens: int, pairs: int, sequences: int, masked: int = 0) -> float:
        """`flops` from sums over the sequences: their lengths, the squares of these, their number, the labels."""
        heads = masked * (self.cost_per_token(1.0) - self.cost_per_token())
        if self.pooler:
            heads += 6.0 * sequences * self.embed * (self.embed + (2 if self.next_sentence else 0))
        return tokens * self.cost_per_token() + pairs * self.cost_per_pair() + heads
