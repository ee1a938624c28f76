"""The configuration of a BERT (Devlin et al. 2019), of its modern variant, and of their heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, get_args

from flashtrain.errors import one_of
from flashtrain.models.attention import check_heads
from flashtrain.models.block import check_config, round_up
from flashtrain.models.feed_forward import ACTIVATIONS
from flashtrain.models.layer_spec import GATED, AlikeLayers
from flashtrain.models.positions import check_rotary
from flashtrain.settings import options

FAMILIES = get_args(options.BertFamily)
POSITIONS = get_args(options.Positions)
NORM_PLACES = ("post", "pre")
BERT_EPSILON = 1e-12


class BertSize(NamedTuple):
    """The layers, heads and width of a named model size."""

    layers: int
    heads: int
    embed: int


BERT_SIZES = {
    # The smallest of Turc et al. 2019 (arXiv 1908.08962).
    "tiny": BertSize(layers=2, heads=2, embed=128),
    "base": BertSize(layers=12, heads=12, embed=768),
    "large": BertSize(layers=24, heads=16, embed=1024),
}


@dataclass(frozen=True)
class BertConfig(AlikeLayers):
    """The configuration of BERT's encoder and heads; with the weights it is
    enough to rebuild a model.

    Args:
        vocab_size: Number of tokens, special tokens included.
        vocab_rows: Rows of the embedding table, at least vocab_size; further
            rows are never predicted.
        context: Longest sequence in tokens, a limit with learned positions only.
        ffn: Width inside the feed-forward.
        segments: Number of segment embeddings (0: none).
        norm_place: "post" (norm after each sum, as in BERT) or "pre" (norm before
            attention and feed-forward).
        activation: A name in feed_forward.ACTIVATIONS.
        dropout: Dropout probability for embeddings, attention weights and both branches of a block.
        epsilon: The epsilon of every LayerNorm.
        masked_head: Whether there is a head that predicts masked tokens.
        pooler: Whether the first token's state passes a layer with tanh.
        next_sentence: Whether a head on the pooler, which it needs, predicts if the second
            segment followed the first.

    Raises:
        UserError: Sizes do not fit together, or a name is unknown.
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

    norm: ClassVar[str] = "layernorm"

    def __post_init__(self) -> None:
        names = {"positions": POSITIONS, "norm_place": NORM_PLACES, "activation": ACTIVATIONS}
        check_config(self, ("vocab_size", "context", "layers", "ffn"), names)
        head_dim = check_heads(self.embed, self.heads, self.heads)
        if self.positions == "rotary":
            check_rotary(head_dim, self.rope_base)

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
        activation: str | None = None,
    ) -> BertConfig:
        """Make the configuration of a named size.

        Args:
            size: A name in BERT_SIZES, such as "base".
            family: "bert", or "modern" (pre-norm, rotary, GeGLU, no biases, no segments).
            vocab_rows: Rows of the embedding table (None: vocab_size rounded up
                to a multiple of 64).
            activation: A name in feed_forward.ACTIVATIONS (None: the family's; for "bert" GELU's
                tanh form, whereas transformers' BERT computes "gelu_exact").

        Raises:
            UserError: An unknown size or family.
        """
        one_of("model size", size, BERT_SIZES)
        one_of("model family", family, FAMILIES)
        layers, heads, embed = BERT_SIZES[size]
        modern = family == "modern"
        return cls(
            vocab_size=vocab_size,
            vocab_rows=round_up(vocab_size, 64) if vocab_rows is None else vocab_rows,
            context=context,
            layers=layers,
            heads=heads,
            embed=embed,
            # GeGLU has three matrices for GELU's two: 8/3 E instead of 4 E keeps
            # the parameters equal.
            ffn=round_up(math.ceil(embed * 8 / 3), 128) if modern else 4 * embed,
            segments=0 if modern else 2,
            positions="rotary" if modern else "learned",
            norm_place="pre" if modern else "post",
            activation=activation or ("geglu" if modern else "gelu"),
            bias=not modern,
            dropout=dropout,
            epsilon=1e-5 if modern else BERT_EPSILON,
        )

    def cost_per_token(self, masked_share: float = 0.0) -> float:
        """Return the FLOPs of one token's forward and backward, without those
        of attention's scores.

        Each weight of a matrix costs six (Chowdhery et al. 2022, appendix B); embedding
        look-ups cost nothing.

        Args:
            masked_share: The share of the tokens that have a label, 0 to 1.
        """
        width = self.embed
        ffn = (3 if self.activation in GATED else 2) * width * self.ffn
        head = masked_share * (width * width + width * self.vocab_size) if self.masked_head else 0.0
        return 6.0 * (self.layers * (4 * width * width + ffn) + head)

    def cost_per_pair(self) -> float:
        """Return the FLOPs of one query's attention to one key in all layers: two products
        forward, four backward."""
        return 12.0 * self.layers * self.embed

    def flops(self, lengths: Sequence[int], masked: int = 0) -> float:
        """Return the model FLOPs of a batch's forward and backward; padding and
        recomputation are not counted.

        Args:
            lengths: The lengths of the batch's sequences.
            masked: The number of labels.
        """
        return self.flops_of(sum(lengths), sum(length * length for length in lengths), masked)

    def flops_of(self, tokens: float, pairs: float, masked: float = 0) -> float:
        """Return a batch's FLOPs as `flops` does, but from sums over its sequences, or from means.

        Args:
            tokens: Sum of the sequences' lengths.
            pairs: Sum of the squares of the lengths.
            masked: Number of labels.
        """
        labels = masked * (self.cost_per_token(1.0) - self.cost_per_token())
        return tokens * self.cost_per_token() + pairs * self.cost_per_pair() + labels
