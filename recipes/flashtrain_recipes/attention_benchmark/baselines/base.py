"""The interface of an implementation of attention in the benchmark.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.harness.baseline import Baseline

Attend = Callable[[Inputs], Tensor]


class AttentionBaseline(Baseline):
    """An implementation of attention that the benchmark measures."""

    supports: tuple[str, ...] = ()  # the features (Case.needs) that it has

    def refuses(self, case: Any) -> str | None:
        lacking = [word for word in case.needs if word not in self.supports]
        return f"no {lacking[0]}" if lacking else None

    @abstractmethod
    def attend(self, case: Case, context: Context) -> Attend:
        """Return the function to time, which computes out (B, Sq, H, D) from Inputs; `attend`
        itself is not timed, and makes the mask."""

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        """Return a function to time that makes the case's mask, as a training does once for each
        batch; None: the baseline needs no mask to be made."""
        return None


def first(result: Any) -> Tensor:
    """Return the attention output of `result`: the result itself, or its first entry where it
    is a tuple of output and log-sum-exp, as in some versions of flash-attn."""
    return result[0] if isinstance(result, (tuple, list)) else result
