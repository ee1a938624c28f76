"""Rotary positions at a longer context than that of the original training, with
transformers' names and formulas.

Pair i of a head of D numbers turns by base^(-2i/D) radians from token to token. Scalings slow
down the slow pairs, by which attention distinguishes long distances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flashtrain.errors import UserError, at_least, one_of

ORIGINAL = "original_max_position_embeddings"
# The entries that each kind always has in a file; ntk, which transformers has not,
# is another base there.
ENTRIES = {
    "ntk": ("factor",),
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of rotary positions. Raises UserError if rope_type is unknown, or if the factor or
    the original context is too low."""

    # Or linear (Chen et al. 2023), yarn (Peng et al. 2023), llama3 (Llama 3.1).
    rope_type: str = "ntk"
    factor: float = 1.0  # how many times longer the context is; ntk of 1 is no scaling
    original_max_position_embeddings: int = 0  # tokens of the original context, for yarn and llama3
    # Of queries and keys under yarn; None: 1 + 0.1 ln(factor).
    attention_factor: float | None = None
    # If both are given, multiples of the logarithm in a quotient of two such factors.
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0  # yarn leaves pairs alone that turn more often in the original context
    beta_slow: float = 1.0  # and slows pairs that turn less often by the whole factor
    truncate: bool = True  # whether the numbers of these two pairs are rounded outwards
    low_freq_factor: float = 1.0  # as beta_slow, for llama3
    high_freq_factor: float = 4.0  # as beta_fast, for llama3

    def __post_init__(self) -> None:
        one_of("rope_type", self.rope_type, ENTRIES)
        at_least("rope_factor", self.factor, 1)
        at_least(
            ORIGINAL,
            self.original_max_position_embeddings,
            int(ORIGINAL in ENTRIES[self.rope_type]),
        )

    @classmethod
    def of_entries(cls, given: float | Mapping[str, Any]) -> RopeScaling:
        """Make a scaling from transformers' rope_parameters, or from a value of `plain`. Raises
        UserError for another kind than default, linear, yarn and llama3."""
        if not isinstance(given, Mapping):
            return cls(factor=given)
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind == "default":
            return cls()
        if kind == "ntk" or kind not in ENTRIES or not given.get("factor"):
            raise UserError(
                f"rope_type={kind}: expected default, linear, yarn or llama3, with a factor. "
                "Use recipe=hf."
            )
        known = [
            one.name for one in fields(cls) if one.name != ORIGINAL or ORIGINAL in ENTRIES[kind]
        ]
        return cls(
            **{name: given[name] for name in known if given.get(name) is not None}
            | {"rope_type": kind}
        )

    def plain(self) -> float | dict[str, Any]:
        """Return a plain value for a file: transformers' entries, or for ntk the factor alone, the
        form of files from before there were other scalings."""
        written, default = ("rope_type", *ENTRIES[self.rope_type]), asdict(RopeScaling())
        own = {
            name: one
            for name, one in asdict(self).items()
            if name in written or one != default[name]
        }
        return self.factor if self.rope_type == "ntk" else own

    def parameters(self, base: float, head_dim: int) -> dict[str, Any]:
        """Return transformers' rope_parameters: the base of the angles with the scaling's entries;
        ntk is the base alone."""
        own = self.plain()
        return {"rope_theta": self.base(base, head_dim), **(own if isinstance(own, dict) else {})}

    def scaled(self, kind: str | None, factor: float | None, original: float) -> RopeScaling:
        """Return this scaling, changed to the kind model.rope and the factor model.rope_factor;
        `original`: the context in tokens that needs no scaling."""
        if kind is not None and factor is None:
            raise UserError(
                f"model.rope={kind} needs model.rope_factor, such as model.rope_factor=4."
            )
        if factor is None:
            return self
        if self.factor == 1:
            tokens = max(1, round(original)) if ORIGINAL in ENTRIES.get(kind or "ntk", ()) else 0
            return RopeScaling(kind or "ntk", factor, tokens)
        if kind not in (None, self.rope_type):
            raise UserError(
                f"model.rope={kind} would scale positions twice: the weights have "
                f"{self.rope_type}. Remove model.rope: model.rope_factor alone "
                "replaces their factor."
            )
        return replace(self, factor=factor)

    def base(self, base: float, head_dim: int) -> float:
        """Return the base of the angles, which ntk (posted by bloc97 in June 2023; Peng et al.
        2023, section 3.1) raises.

        The slowest pair then turns `factor` times slower, so that the longest distance turns it no
        further than in training; the fastest pair, which distinguishes neighbours, turns as before.
        """
        raised = self.rope_type == "ntk" and self.factor != 1
        return base * self.factor ** (head_dim / (head_dim - 2)) if raised else base

    def frequencies(
        self, head_dim: int, base: float, device: Any = None, dtype: Any = torch.float64
    ) -> tuple[Tensor, float]:
        """Return (the inverse frequencies (D/2,) in radians a token, the factor by which queries
        and keys are multiplied: yarn's, else 1)."""
        exponent = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
        plain = self.base(base, head_dim) ** -exponent
        if self.rope_type in ("ntk", "linear"):
            return plain if self.rope_type == "ntk" else plain / self.factor, 1.0
        if self.rope_type == "llama3":
            turns = self.original_max_position_embeddings / math.tau * plain
            left = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            by = 1.0
        else:
            fast, slow = self._pairs(head_dim, base)
            left, by = (slow - exponent * (head_dim / 2)) / (slow - fast), self._attention_factor()
        left = left.clamp(0, 1)
        return plain * left + plain / self.factor * (1 - left), by

    def _pairs(self, head_dim: int, base: float) -> tuple[float, float]:
        """Return for yarn the indices of the pairs that turn beta_fast and beta_slow times in the
        original context."""
        original = self.original_max_position_embeddings / math.tau
        turns = (self.beta_fast, self.beta_slow)
        fast, slow = (
            head_dim * math.log(original / often) / (2 * math.log(base)) for often in turns
        )
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, head_dim - 1)
        return fast, slow + 0.001 * (fast == slow)  # as transformers has it

    def _attention_factor(self) -> float:
        log = 0.1 * math.log(self.factor)
        given = (
            self.mscale
            and self.mscale_all_dim
            and (self.mscale * log + 1) / (self.mscale_all_dim * log + 1)
        )
        return (given or log + 1) if self.attention_factor is None else self.attention_factor
