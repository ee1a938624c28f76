"""What mixers that keep a state share. None of them is attention, and none is called exact.

Shapes: B batch, S sequence, E embedding width, N documents, H heads, K and V of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.mixer import MixerMemory, Rotary
from flashtrain_kernels.recurrences import Rows

CHUNK = 64  # tokens; of flash-linear-attention's kernels


class StateSizes:
    """What a mixer whose state passes from token to token costs.

    Its memory is counted from the tensors that flash-linear-attention's kernels save; no
    measurement has confirmed it yet.
    """

    state: Any  # numbers of all heads' states
    products: Any  # FLOPs of a token's forward for each of them
    # Numbers of a token that the backward needs: projections, convolution, inverses of chunks.
    inputs: Any
    inner: Any  # width of the recurrence's result
    passed: Any  # numbers of the map of a run of tokens, which devices gather
    columns: Any  # further numbers of a token's result, by which a run's map is found

    def flops(self, context: int) -> float:
        return 3.0 * self.products * self.state

    def memory(self, *, activation: int, **sizes: Any) -> MixerMemory:
        return MixerMemory(
            inputs=self.inputs * activation,
            result=2 * self.inner * activation,  # gated and normed too
            gradients=self.inner * activation,
            # States at chunks and their gradients; those of what is read.
            sums=4 * self.state / CHUNK + 6 * self.inner,
        )


@dataclass(frozen=True)
class OwnStateSpec(StateSizes):
    """The sizes of a mixer of flashtrain's own, which keeps a state (K, V) for each head."""

    heads: int
    head_dim: int  # V

    kind: ClassVar[str]
    mixer: ClassVar[type[StateMixer]]
    crosses_devices: ClassVar[str | None] = "state"
    any_mask: ClassVar[bool] = False  # it sees all earlier tokens of a document
    expand: ClassVar[int] = 1  # inner width over the attention's
    groups: ClassVar[int | None] = None  # of heads that share keys and queries; None: none do
    delta: ClassVar[bool] = False  # whether a run's map is a matrix (delta rule), not a number

    @classmethod
    def of_pattern(cls, value: str | None, attention: AttentionSpec) -> OwnStateSpec:
        if value is not None:
            raise UserError(f"model.pattern has {cls.kind}:{value}. Expected {cls.kind} alone.")
        return cls(cls.expand * attention.heads, attention.head_dim)

    def make(self, embed: int, *, bias: bool, rotary: Rotary | None, **options: Any) -> StateMixer:
        return self.mixer(embed, self, bias, rotary)

    def new_cache(self, tokens: int) -> StateCache:
        return StateCache()

    @property
    def key_dim(self) -> int:  # K
        return self.head_dim

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def parts(self) -> list[int]:
        """The widths of values (q of the delta rule), keys and queries."""
        return [self.inner, *[(self.groups or self.heads) * self.key_dim] * 2]

    @property
    def products(self) -> int:
        return 6 if self.delta else 4

    @property
    def state(self) -> int:
        return self.inner * self.key_dim

    @property
    def inputs(self) -> int:  # fla's kernel of state spaces needs keys of every head
        inverse = CHUNK if self.delta else 0
        again = 2 * self.key_dim if self.groups else 0
        return 2 * sum(self.parts) + 2 * self.inner + (inverse + again) * self.heads

    @property
    def passed(self) -> int:
        return self.heads * self.key_dim * ((self.key_dim if self.delta else 1) + self.head_dim)

    @property
    def columns(self) -> int:
        return self.heads * (self.key_dim if self.delta else self.head_dim)


class StateCache:
    """The state after the tokens that a layer has read, and the last inputs of its convolution."""

    length = 0
    state: Tensor | None = None  # (B, H, K, V)
    last: Tensor | None = None

    def rows(self, x: Tensor, spec: OwnStateSpec) -> Rows:
        """Return the rows of x (B, S, ...), one document each, with the states before them."""
        rows = Rows(torch.arange(x.shape[1], device=x.device).expand(len(x), -1))
        sizes = len(x), spec.heads, spec.key_dim, spec.head_dim
        empty = torch.zeros(
            sizes, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
        )
        rows.state = empty if self.state is None else self.state
        return rows


class StateMixer(nn.Module):
    """A mixer that keeps states; a subclass makes `inputs` and `output`, and has `mix`, which
    computes what `output` reads from what `inputs` returns."""

    active_dropout = 0.0
    inputs: nn.Linear
    output: nn.Linear
    mix: Callable[..., Tensor]

    def __init__(self, embed: int, spec: Any, bias: bool, rotary: Rotary | None) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self, x: Tensor, *, positions: Any = None, mask: Any = None, cache: Any = None
    ) -> Tensor:
        """Compute (B, S, E) from x (B, S, E). mask: the documents (layer_masks), unless there is a
        cache."""
        rows = mask if cache is None else cache.rows(x, self.spec)
        out = self.output(self.mix(self.inputs(x), positions, rows, cache))
        if cache is not None:
            cache.state, cache.length = rows.state, cache.length + x.shape[1]
        return out

    def reset_parameters(self) -> None:
        """Initialize the parameters that are not of Linear layers or norms."""
