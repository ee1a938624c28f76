"""What every implementation of attention offers the benchmark.

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
    """One implementation of attention."""

    supports: tuple[str, ...] = ()  # of Case.needs

    def refuses(self, case: Any) -> str | None:
        lacking = [word for word in case.needs if word not in self.supports]
        return f"no {lacking[0]}" if lacking else None

    @abstractmethod
    def attend(self, case: Case, context: Context) -> Attend:
        """Return a function of one set of inputs that returns out (B, Sq, H, D). Masks are made here, once."""

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        """Return what describes the case's mask once a batch, to be timed; None where there is nothing."""
        return None


def first(result: Any) -> Tensor:
    """Return the output of a function that returns it alone in some versions, and with the log-sum-exp in others."""
    return result[0] if isinstance(result, (tuple, list)) else result
