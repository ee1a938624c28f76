"""What mixers that keep a state share. None of them is attention, and none is called exact.

Shapes: B batch, S sequence, E embedding width, N documents, H heads, K and V of a state.
"""

from __future__ import annotations

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
    products: ClassVar[int] = 4

    @classmethod
    def of_pattern(cls, value: str | None, attention: AttentionSpec) -> OwnStateSpec:
        if value is not None:
            raise UserError(f"model.pattern has {cls.kind}:{value}. Expected {cls.kind} alone.")
        return cls(attention.heads, attention.head_dim)

    @property
    def key_dim(self) -> int:
        """A state's K, also the width of queries and keys."""
        return self.head_dim

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    columns = inner

    @property
    def state(self) -> int:
        return self.inner * self.key_dim

    @property
    def passed(self) -> int:
        return self.heads * self.key_dim * (1 + self.head_dim)

    def make(self, embed: int, *, bias: bool, rotary: Rotary | None, **options: Any) -> StateMixer:
        return self.mixer(embed, self, bias, rotary)

    def new_cache(self, tokens: int) -> StateCache:
        return StateCache()


class StateCache:
    """The state after the tokens that a layer has read, and the last inputs of its convolution."""

    def __init__(self) -> None:
        self.length = 0
        self.state: Tensor | None = None  # (B, H, K, V)
        self.last: Tensor | None = None


def whole_rows(x: Tensor) -> Rows:
    """Return the rows of x (B, S, ...) as one document each."""
    return Rows(torch.arange(x.shape[1], device=x.device).expand(len(x), -1))


class StateMixer(nn.Module):
    """A mixer that keeps states; a subclass makes `inputs` and `output`, and has `mix`."""

    active_dropout = 0.0
    inputs: nn.Linear
    output: nn.Linear

    def __init__(self, embed: int, spec: Any, bias: bool, rotary: Rotary | None) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self, x: Tensor, *, positions: Any = None, mask: Any = None, cache: Any = None
    ) -> Tensor:
        """Compute (B, S, E) from x (B, S, E); `mask` are the documents, from layer_masks, unless
        there is a cache."""
        if cache is None:
            return self.output(self.mix(self.inputs(x), positions, mask, None))
        rows, spec = whole_rows(x), self.spec
        if cache.state is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            cache.state = x.new_zeros(len(x), spec.heads, spec.key_dim, spec.head_dim, dtype=wide)
        rows.state = cache.state
        out = self.output(self.mix(self.inputs(x), positions, rows, cache))
        cache.state, cache.length = rows.state, cache.length + x.shape[1]
        return out

    def mix(self, x: Tensor, positions: Any, rows: Rows, cache: StateCache | None) -> Tensor:
        """Compute what `output` reads from what `inputs` returned."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize the parameters that are not of Linear layers or norms."""
