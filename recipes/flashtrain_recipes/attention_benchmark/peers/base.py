"""What an implementation is to the benchmark.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs

Attend = Callable[[Inputs], Tensor]


class Peer(ABC):
    """One implementation. name: in settings; title: in tables."""

    name: str
    title: str
    extras: tuple[str, ...] = ()  # of Case.extras, those that the implementation has

    def missing(self, device: torch.device) -> str | None:
        """Why the implementation cannot be had on this device at all; None where it can."""
        return None

    def applies(self, case: Case) -> bool:
        """False where the case is not this implementation's business: it is left out without a word."""
        return True

    def refuses(self, case: Case) -> str | None:
        """What of the case the implementation does not have, in words; None where it may be tried."""
        lacking = [word for word in case.extras if word not in self.extras]
        return f"no {lacking[0]}" if lacking else None

    @abstractmethod
    def attend(self, case: Case, context: Context) -> Attend:
        """A function of one set of inputs that returns out (B, Sq, H, D). Masks are made here, once, outside it."""

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Entered around everything that is computed with this implementation."""
        return contextlib.nullcontext()

    def leaves(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that the backward pass differentiates for: q, k, v, and a bias and sink that want gradients."""
        extra = [x for x in (inputs.bias, inputs.sink) if x is not None and x.requires_grad]
        return [inputs.q, inputs.k, inputs.v, *extra]

    def gradients(self, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv in the shapes of q, k and v, from the gradients of `leaves`."""
        return found[0], found[1], found[2]

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        """What is computed once a batch to describe the case's mask, to be timed; None where there is nothing."""
        return None


def first(result: Any) -> Tensor:
    """The output of functions that return it alone in some versions and with the log-sum-exp in others."""
    return result[0] if isinstance(result, (tuple, list)) else result
