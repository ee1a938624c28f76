"""What an implementation of attention over several devices is, and where a case is computed.

B batch (1), n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor

from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.traffic import Traffic
from flashtrain_kernels import Mask
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.ranks import Team
from flashtrain_recipes.harness.baseline import Baseline
from flashtrain_recipes.harness.rows import Row


class Place:
    """A case, the ranks that compute it, and the mask of the whole sequence on their device.

    Attributes:
        layout: gives the layout of a name.
    """

    def __init__(self, case: ContextCase, team: Team) -> None:
        self.case, self.team = case, team
        self.mask: Mask = case.mask._replace(queries=case.mask.queries.to(team.device))
        self.layout: Callable[[str], Layout] = cache(lambda name: LAYOUTS[name](case.mask, case.degree))


class Attention(NamedTuple):
    """A baseline's attention at one case.

    Attributes:
        call: computes this rank's output, differentiable, from its q (B, n, H, D), k and v (B, n, K, D).
        traffic: bytes that the busiest rank sends.
        together: neighbouring ranks that compute the same tokens, some heads each, so that their work is even.
    """

    call: Callable[..., Tensor]
    traffic: Traffic
    together: int = 1


@dataclass(frozen=True)
class ContextBaseline(Baseline):
    """An implementation that computes by flashtrain.distributed.context.local_attention, in one layout.

    Attributes:
        way: the method in words, the column of that name.
        layout: a name of flashtrain.distributed.context.layout.
    """

    name: str
    way: str
    layout: str

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.way}, {self.layout}"

    def columns(self, case: ContextCase) -> Row:
        return {"implementation": self.title, "way": self.way, "layout": self.layout, **case.columns()}

    @abstractmethod
    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        """Return the attention of tensors like these."""
