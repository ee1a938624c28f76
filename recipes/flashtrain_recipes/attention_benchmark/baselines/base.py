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
        """Return the function to time: it computes out (B, Sq, H, D) from Inputs. Masks
        are made here, untimed."""

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        """Return a function to time that makes the case's mask, as once per batch; None:
        the baseline makes none."""
        return None


def first(result: Any) -> Tensor:
    """Return the output of a function that returns it alone in some versions, and in a
    tuple with lse in others."""
    return result[0] if isinstance(result, (tuple, list)) else result
