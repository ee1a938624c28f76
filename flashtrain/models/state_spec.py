"""Mixers that keep states, as plain values; state_mixer.py has their module. None of them is
attention, and none is called exact.

Linear attention reads q S, where a head's state S decays and gains k v^T, and a norm takes the
place of softmax's denominator:

- retention: decays of 1 - 2^(-5 - head), rotated q and k (Sun et al. 2023, "Retentive Network");
- lightning: ALiBi's slopes as decays, SiLU of q, k, v (Qin et al. 2024, "Lightning Attention-2");
- gla: a decay for each token and head, sigmoid(x w)^(1/16) (Yang et al. 2023, "Gated Linear
  Attention", with one number a head, as in Sun et al. 2024, "You Only Cache Once");
- norm_attention: no decay, 1 + elu of q and k (Qin et al. 2022, "The Devil in Linear Transformer").

Behind a short convolution:

- delta: the gated delta rule (Yang et al. 2024, "Gated Delta Networks"), as Qwen3.5's;
- mamba2: a state space (Dao and Gu 2024, "Transformers are SSMs"), as Granite 4's.

Letters: H heads, K and V of a head's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashtrain.errors import UserError
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.mixer import MixerMemory, Rotary
from flashtrain.models.state_mixer import StateCache, StateMixer

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
    """A mixer of flashtrain's own with a state (K, V) for each head; subclasses are its kinds."""

    heads: int
    head_dim: int  # V

    kind: ClassVar[str]
    crosses_devices: ClassVar[str | None] = "state"
    any_mask: ClassVar[bool] = False  # it sees all earlier tokens of a document
    expand: ClassVar[int] = 1  # inner width over the attention's
    keys: ClassVar[int | None] = None  # K, of one group of heads; None: V, of each head
    rates: ClassVar[int] = 0  # numbers of a token and head: decay or step, and beta
    convolved: ClassVar[bool] = False
    gated: ClassVar[bool] = True  # what is read, by the token
    together: ClassVar[bool] = False  # whether the norm is of all heads, not of each

    def __post_init__(self) -> None:
        heads, inner, keys = self.heads, self.heads * self.head_dim, self.keys or self.head_dim
        delta, shared = self.rates == 2, self.keys is not None
        parts = [inner, *[keys if shared else inner] * 2]  # of what is mixed: x, B, C; or q, k, v
        # fla's kernels solve the delta rule by chunks, and need keys of every head.
        more = heads * (CHUNK * delta + 2 * keys * shared)
        derived = {
            "key_dim": keys,
            "inner": inner,
            "parts": parts,
            "widths": [inner * self.gated, sum(parts), heads * self.rates],
            "products": 6 if delta else 4,
            "state": inner * keys,
            "inputs": 2 * sum(parts) + 2 * inner + more,
            # A run's map is a matrix of the delta rule, else a number.
            "passed": heads * keys * ((keys if delta else 1) + self.head_dim),
            "columns": heads * keys if delta else inner,
        }
        vars(self).update(derived)  # the fields alone are frozen, compared and stored

    @classmethod
    def of_pattern(cls, value: str | None, attention: AttentionSpec) -> OwnStateSpec:
        if value is not None:
            raise UserError(f"model.pattern has {cls.kind}:{value}. Expected {cls.kind} alone.")
        return cls(cls.expand * attention.heads, attention.head_dim)

    def make(self, embed: int, *, bias: bool, rotary: Rotary | None, **options: Any) -> StateMixer:
        return StateMixer(embed, self, bias, rotary)

    def new_cache(self, tokens: int) -> StateCache:
        return StateCache()


class RetentionSpec(OwnStateSpec):
    kind = "retention"


class LightningSpec(OwnStateSpec):
    kind, together = "lightning", True  # as in MiniMax


class GatedSpec(OwnStateSpec):
    kind, rates = "gla", 1


class NormSpec(OwnStateSpec):
    kind, gated, together = "norm_attention", False, True


class DeltaSpec(OwnStateSpec):
    kind, rates, convolved = "delta", 2, True


class Mamba2Spec(OwnStateSpec):
    kind, rates, convolved, together, expand, keys = "mamba2", 1, True, True, 2, 128
