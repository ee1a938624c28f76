"""A layer of a decoder or encoder as plain values: its mixer, its feed-forward, and
where its norms stand.

A model's configuration holds a tuple of layers. A file (`plain`, `layer_of`) stores only the
fields of a spec that differ from their defaults.

Letters: E embedding width, F width inside the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.mixer import MixerSpec
from flashtrain.registry import component

# The activation of one half of a twice as wide projection, times the other half.
GATED = ("swiglu", "geglu")


@dataclass(frozen=True)
class FeedForwardSpec:
    """A feed-forward, the same for every token (see FeedForward)."""

    width: int  # F
    activation: str = "gelu"  # a name in feed_forward.ACTIVATIONS
    # Whether autograd differentiates its chunks; our operator stores less.
    by_autograd: bool = False

    @property
    def width_of_token(self) -> int:
        """The inner width that one token uses: with experts, the sum over those that it goes to."""
        return self.width

    @property
    def gated(self) -> bool:
        """Whether the activation is gated, with a second inner matrix, as SwiGLU is."""
        return self.activation in GATED


@dataclass(frozen=True)
class ExpertsSpec(FeedForwardSpec):
    """A mixture of experts, each a feed-forward of inner width `width` that some of
    the tokens go through."""

    experts: int = 1
    top: int = 1  # experts that a token is routed to
    shared: int = 0  # inner width of the feed-forward that every token goes through besides

    @property
    def width_of_token(self) -> int:
        return self.top * self.width + self.shared


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its mixer, its feed-forward and where its norms stand."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    # Before the mixer and the feed-forward (GPT-2), or after each sum ("post": BERT).
    norms: str = "pre"

    def plain(self) -> dict[str, Any]:
        """Return plain values for a file, of which layer_of makes the spec again."""
        own = {
            "mixer": {"kind": self.mixer.kind, **_given(self.mixer)},
            "feed_forward": _given(self.feed_forward),
        }
        return own if self.norms == "pre" else {**own, "norms": self.norms}


def layer_of(values: Mapping[str, Any]) -> LayerSpec:
    """Make a layer of the values of LayerSpec.plain. Raises UserError if no mixer of this kind is
    registered."""
    mixer = {name: value for name, value in values["mixer"].items() if name != "kind"}
    inner = values["feed_forward"]
    form = ExpertsSpec if "experts" in inner else FeedForwardSpec
    return LayerSpec(
        component("mixer", values["mixer"]["kind"])(**mixer),
        form(**inner),
        values.get("norms", "pre"),
    )


def layers_alike(
    layers: int,
    embed: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    activation: str = "gelu",
    *,
    rotary: bool = False,
    norms: str = "pre",
) -> tuple[LayerSpec, ...]:
    """Return `layers` layers of attention that are all alike."""
    attention = AttentionSpec(heads, kv_heads, embed // heads, rotary=rotary)
    return (LayerSpec(attention, FeedForwardSpec(ffn, activation), norms),) * layers


class AlikeLayers:
    """The fields of an encoder's configuration from which its layers, all alike, are made."""

    layers: int
    embed: int
    heads: int
    ffn: int
    activation: str
    positions: str
    norm_place: str = "pre"

    @property
    def head_dim(self) -> int:
        """The width D of one attention head."""
        return self.embed // self.heads

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The layers, which are all alike."""
        sizes = (self.layers, self.embed, self.heads, self.heads, self.ffn, self.activation)
        return layers_alike(*sizes, rotary=self.positions != "learned", norms=self.norm_place)


def mixers(layers: Sequence[LayerSpec], kind: type) -> list[Any]:
    """Return the mixers of one kind, such as AttentionSpec, in the order of their layers; also
    those that a layer has beside another one."""
    each = [layer.mixer for layer in layers]
    found = [one if isinstance(one, kind) else getattr(one, "beside", None) for one in each]
    return [one for one in found if isinstance(one, kind)]


def _given(spec: Any) -> dict[str, Any]:
    """Return a spec's fields whose values differ from their defaults."""
    default = {one.name: one.default for one in fields(spec)}
    return {name: value for name, value in asdict(spec).items() if value != default[name]}
