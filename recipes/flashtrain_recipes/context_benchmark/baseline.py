"""What an implementation of shared attention is, and where a case is computed.

B batch (1), n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from flashtrain.distributed.context.layout import Layout, make_layout
from flashtrain.distributed.context.ways import Traffic
from flashtrain_kernels import Mask
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.ranks import Team
from flashtrain_recipes.harness.baseline import Baseline
from flashtrain_recipes.harness.rows import Row


class Place:
    """A case, the ranks that compute it, and the mask of the whole sequence on their device."""

    def __init__(self, case: ContextCase, team: Team) -> None:
        self.case, self.team = case, team
        self.mask: Mask = case.mask._replace(queries=case.mask.queries.to(team.device))
        self.layout: Callable[[str], Layout] = cache(lambda name: make_layout(name, case.mask, case.degree))


class Attention(NamedTuple):
    """call: (this rank's q (B, n, H, D), k, v (B, n, K, D)) -> its out, differentiable.

    traffic: bytes that the busiest rank sends; None where that is not known. together: neighbouring ranks that compute
    all of each other's tokens, some heads each, so that their work is even.
    """

    call: Callable[..., Tensor]
    traffic: Traffic | None = None
    together: int = 1


@dataclass(frozen=True)
class ContextBaseline(Baseline):
    """One implementation. way: in words. layout: a layout's name."""

    name: str
    way: str
    layout: str

    # Whether it computes by distributed.context.local_attention, so that its computing can be left out.
    separable = False

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.way}, {self.layout}"

    def columns(self, case: ContextCase) -> Row:
        return {"implementation": self.title, "way": self.way, "layout": self.layout, **case.columns()}

    @abstractmethod
    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        """The attention of tensors like these."""

    def computing(self, place: Place) -> AbstractContextManager[Any]:
        """Entered around everything that is computed with it."""
        return nullcontext()
