"""The configuration of a decoder, and the named sizes: GPT-2's (Radford et al. 2019), and
Llama-style ones as large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, get_args

from flashtrain.errors import UserError, at_least, one_of
from flashtrain.models.attention import check_heads
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.block import EPSILON, NORMS, check_config, round_up
from flashtrain.models.feed_forward import ACTIVATIONS
from flashtrain.models.layer_pattern import layers_of_pattern
from flashtrain.models.layer_spec import FeedForwardSpec, LayerSpec, layer_of, layers_alike, mixers
from flashtrain.models.positions import check_rotary
from flashtrain.models.rope_scaling import RopeScaling
from flashtrain.models.trainable import DecoderShape
from flashtrain.settings import options

POSITIONS = get_args(options.Positions)
BLOCK = 64  # tokens that TransNormer's early layers attend to
FAMILIES = get_args(options.DecoderName)


class Size(NamedTuple):
    """The layers, heads and width of a named model size."""

    layers: int
    heads: int
    embed: int
    llama_kv_heads: int  # one key/value head per four query heads (five where there are 25)


SIZES = {
    # About 1M parameters with a byte vocabulary.
    "demo": Size(layers=4, heads=4, embed=128, llama_kv_heads=1),
    "124m": Size(layers=12, heads=12, embed=768, llama_kv_heads=3),
    "355m": Size(layers=24, heads=16, embed=1024, llama_kv_heads=4),
    "774m": Size(layers=36, heads=20, embed=1280, llama_kv_heads=5),
    # GPT-3 XL's width with heads of 128.
    "1.3b": Size(layers=24, heads=16, embed=2048, llama_kv_heads=4),
    "1.5b": Size(layers=48, heads=25, embed=1600, llama_kv_heads=5),
}


@dataclass(frozen=True)
class DecoderConfig(DecoderShape):
    """The configuration of a decoder; with the weights it is enough to rebuild the model.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        vocab_rows: Rows of the embedding table, at least vocab_size (a multiple of 64 is faster);
            further rows are never predicted.
        context: Longest sequence in tokens, a limit with learned positions only.
        embed: Width E.
        layers: What each layer is made of.
        positions: "learned" (a table), or "rotary" (in the layers that say so).
        dropout: Dropout probability for embeddings, attention weights and both branches of a block.
        rope_base: Base of the rotary angles in the original training.
        rope: Scaling of the rotary angles to a longer context than that of the original training.

    Raises:
        UserError: Sizes do not fit together, or a name is unknown.
    """

    vocab_size: int
    vocab_rows: int
    context: int
    embed: int
    layers: tuple[LayerSpec, ...]
    positions: str = "learned"
    norm: str = "layernorm"
    bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    rope_base: float = 10000.0
    rope: RopeScaling = field(default_factory=RopeScaling)

    epsilon: ClassVar[float] = EPSILON
    frozen: ClassVar[int] = 0  # type: ignore[misc]
    quantized: ClassVar[int] = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_config(self, ("vocab_size", "context"), {"positions": POSITIONS, "norm": NORMS})
        at_least("layers", len(self.layers), 1)
        for layer in dict.fromkeys(self.layers):
            at_least("ffn", layer.feed_forward.width, 1)
            one_of("activation", layer.feed_forward.activation, ACTIVATIONS)
        for mixer in dict.fromkeys(mixers(self.layers, AttentionSpec)):
            if mixer.rotary:
                check_rotary(mixer.head_dim, self.rope_base)
        if self.positions != "rotary" and self.rope.factor != 1:
            raise UserError(
                f"rope_factor={self.rope.factor:g} with learned positions, which have no angles "
                "to scale. Set positions=rotary, or remove rope_factor."
            )

    @property
    def outside(self) -> int:  # type: ignore[override]
        """Number of parameters outside the layers: of the embedding table and learned positions."""
        return (self.vocab_rows + (self.context if self.positions == "learned" else 0)) * self.embed

    @property
    def alike(self) -> LayerSpec | None:
        """The spec that all layers have, if they are alike: attention to all tokens, with rotary
        positions if the model has them; else None."""
        first = self.layers[0]
        mixer = first.mixer
        whole = (
            type(mixer) is AttentionSpec
            and mixer.window is None
            and mixer.chunk is None
            and mixer.rotary == (self.positions == "rotary")
        )
        return first if whole and len(set(self.layers)) == 1 else None

    def plain(self) -> dict[str, Any]:
        """Return plain values for a file, of which `of_plain` makes the configuration again.

        Where all layers are `alike`, `layers` is their number, and their sizes are values of
        their own (heads, kv_heads, ffn, activation), the form of files before layers could differ.
        """
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        own["rope_factor"] = own.pop("rope").plain()
        alike = self.alike
        if alike is None:
            return {**own, "layers": [layer.plain() for layer in self.layers]}
        heads = {name: getattr(alike.mixer, name) for name in ("heads", "kv_heads")}
        inner = {"ffn": alike.feed_forward.width, "activation": alike.feed_forward.activation}
        return {**own, "layers": len(self.layers), **heads, **inner}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any], **changes: Any) -> DecoderConfig:
        """Make a configuration of the values of `plain`, with some of them changed. Raises
        UserError if the values do not fit together."""
        own = {**values, **changes}
        rope = RopeScaling.of_entries(own.pop("rope_factor", 1.0))
        if isinstance(own["layers"], int):
            sizes = (own.pop(name) for name in ("heads", "kv_heads", "ffn"))
            heads, kv_heads, ffn = sizes
            check_heads(own["embed"], heads, kv_heads)
            options = {
                "activation": own.pop("activation", "gelu"),
                "rotary": own.get("positions") == "rotary",
            }
            own["layers"] = layers_alike(
                own["layers"], own["embed"], heads, kv_heads, ffn, **options
            )
        else:
            own["layers"] = tuple(layer_of(layer) for layer in own["layers"])
        return cls(rope=rope, **own)

    def changed(self, **changes: Any) -> DecoderConfig:
        """Return the configuration with other values, named as `plain` names them."""
        return self.of_plain(self.plain(), **changes)

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
        rope: str | None = None,
        rope_factor: float | None = None,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        ffn: int | None = None,
        pattern: Sequence[str] = ("full",),
    ) -> DecoderConfig:
        """Make the configuration of a named size; the output head is tied to the embedding table.

        Args:
            size: A name in SIZES, such as "124m".
            family: "gpt2", or "llama" (RMSNorm, SwiGLU, rotary positions,
                grouped-query, no biases), or "transnormer" (llama's block with layers of its own).
            vocab_rows: Rows of the embedding table (None: vocab_size rounded up
                to a multiple of 64).
            positions: "learned" or "rotary" (None: the family's).
            rope_base: As DecoderConfig's, for rotary positions only (None: 10000).
            rope, rope_factor: Scaling of rotary positions from context / rope_factor tokens, a kind
                of RopeScaling (None: ntk) and its factor (None: 1).
            layers, width, heads, kv_heads, ffn: Sizes in place of those of the named size.
            pattern: The layers' mixers as words (layer_pattern.py); the list is repeated until
                all layers have one.

        Raises:
            UserError: A size, family or mixer is unknown, sizes do not fit together, or rope_base
                or rope_factor is given with learned positions.
        """
        one_of("model size", size, SIZES)
        one_of("model family", family, FAMILIES)
        llama, row = family != "gpt2", SIZES[size]
        layers = layers or row.layers
        if family == "transnormer" and list(pattern) == ["full"]:
            late = layers // 2
            pattern = [f"chunk:{BLOCK}"] * (layers - late) + ["norm_attention"] * late
        positions = positions or ("rotary" if llama else "learned")
        if rope_base is not None and positions != "rotary":
            raise UserError(
                f"rope_base={rope_base:g} with {positions} positions, which have no angles. "
                "Set positions=rotary, or remove rope_base."
            )
        embed, heads = width or row.embed, heads or row.heads
        if kv_heads is None:  # the size's own share of the heads, as far as it divides them
            kv_heads = math.gcd(heads, row.llama_kv_heads) if family == "llama" else heads
        # SwiGLU has three matrices for GELU's two: 8/3 E instead of 4 E keeps the parameters equal.
        ffn = ffn or (round_up(math.ceil(embed * 8 / 3), 128) if llama else 4 * embed)
        attention = AttentionSpec(
            heads, kv_heads, check_heads(embed, heads, kv_heads), rotary=positions == "rotary"
        )
        inner = FeedForwardSpec(ffn, "swiglu" if llama else "gelu")
        return cls(
            vocab_size=vocab_size,
            vocab_rows=round_up(vocab_size, 64) if vocab_rows is None else vocab_rows,
            context=context,
            embed=embed,
            layers=layers_of_pattern(pattern, layers, attention, inner),
            positions=positions,
            norm="rmsnorm" if llama else "layernorm",
            bias=not llama,
            dropout=dropout,
            rope_base=10000.0 if rope_base is None else rope_base,
            rope=RopeScaling().scaled(rope, rope_factor, context / (rope_factor or 1)),
        )


GPT2Config = DecoderConfig  # its name when every decoder was a GPT-2
