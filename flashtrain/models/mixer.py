"""A mixer, the part of a layer in which tokens see each other: as plain values (MixerSpec)
and as a module (Mixer).

A run asks a spec before any module exists: what the mixer costs, which masks it
computes, how devices share it.

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

DECAYS = {"A_log", "dt_bias"}  # parameters of recurrences, which mixed precision leaves in float32
Rotary = Callable[[int], nn.Module]  # head dimension -> the module that rotates queries and keys


class Mixer(Protocol):
    """What a block asks of its mixer, an nn.Module that a MixerSpec makes."""

    output: nn.Linear  # the projection that writes into the residual stream

    @property
    def active_dropout(self) -> float:
        """The dropout probability inside the mixer, 0 in evaluation mode."""

    def __call__(
        self, x: Tensor, *, positions: Tensor | None = None, mask: Any = None, cache: Any = None
    ) -> Tensor:
        """Compute (B, S, E) from x (B, S, E).

        Args:
            positions: (B, S) or (1, S) integers, 0 at the first token of each document.
            mask: Which tokens each token sees (see Attention.forward), planned; None:
                the mixer's own rule. Where crosses_devices is "state" and there is no cache, the
                recurrences.Rows within whose documents states pass.
            cache: A cache from the spec's new_cache, to which this call appends x's tokens; None:
                no cache.
        """


class MixerMemory(NamedTuple):
    """The bytes that a mixer needs in a training step; all fields but `temporary` are bytes of one
    token."""

    inputs: float  # what the backward needs besides the result, such as queries, keys and values
    result: float  # the mixer's result, with what the backward needs of it
    gradients: float  # of the result, while the mixer's backward runs
    # In float32, of the mixer's backward; where devices exchange, their exchange counts them.
    sums: float = 0.0
    scores: float = 0.0  # S x S matrices, which no compiler fuses
    selective: float = 0.0  # what selective checkpointing stores of `result`
    temporary: int = 0  # buffers of one mixer's backward, whatever the number of tokens


class MixerSpec(Protocol):
    """A mixer as plain values: a frozen dataclass, stored with the weights.

    A spec that is registered as `mixer` also has the class method of_pattern(value, attention),
    which makes the spec for a word of model.pattern, `KIND` (value is None) or `KIND:value`;
    `attention` is the model's AttentionSpec, for its sizes.
    """

    @property
    def kind(self) -> str:
        """The mixer's name in files, in model.pattern and among a block's submodules."""

    @property
    def crosses_devices(self) -> str | None:
        """What devices that share a sequence exchange: "attention", where our methods pass keys and
        values; "state", where the mixer computes within ShardedSequence.rows; None: they cannot
        share one, and context parallelism refuses the layer."""

    @property
    def any_mask(self) -> bool:
        """Whether the mixer supports any mask; False: only the causal mask within documents."""

    def make(self, embed: int, *, rotary: Rotary | None, **options: Any) -> Any:
        """Make the Mixer of width `embed`; options: causal, bias, dropout,
        attention (see Attention)."""

    def new_cache(self, tokens: int) -> Any:
        """Make an empty cache of one layer for `tokens` tokens; its attribute `length` is the
        number of tokens that it has read."""

    def flops(self, context: int) -> float:
        """Return a token's FLOPs, forward and backward, without the products with weights; nan
        where unknown."""

    def memory(
        self, *, tokens: int, context: int, activation: int, attention: str
    ) -> MixerMemory | None:
        """Return the memory of the mixer in a training step; None where it is unknown, so that a
        run estimates none.

        Args:
            tokens: number of tokens of a micro-batch on a device.
            context: number of tokens of its longest sequence.
            activation: bytes of one element of an activation.
            attention: "flash", "sdpa", "masked" (torch's with a mask of documents) or "standard".
        """
