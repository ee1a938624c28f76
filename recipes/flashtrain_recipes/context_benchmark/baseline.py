"""The interface of an implementation of attention over several devices, and the ranks that a case
is computed on (Place).

B batch (1), n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flashtrain.distributed.context.batch import shard_batch
from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.distributed.context.traffic import Traffic
from flashtrain.models.layer_spec import layers_alike
from flashtrain_kernels import Mask
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.ranks import Team
from flashtrain_recipes.context_benchmark.settings import PLANNED
from flashtrain_recipes.harness.baseline import Baseline
from flashtrain_recipes.harness.rows import Row


class Place:
    """A case, the ranks that compute it, and the mask of the whole sequence on this rank's device.

    Attributes:
        layout: returns a layout, as "zigzag", by its name: it says which tokens each rank holds.
    """

    def __init__(self, case: ContextCase, team: Team) -> None:
        self.case, self.team = case, team
        self.mask: Mask = case.mask._replace(queries=case.mask.queries.to(team.device))
        of_case = case.mask, case.degree
        self.layout: Callable[[str], Layout] = cache(
            lambda name: self._planned() if name == PLANNED else LAYOUTS[name](*of_case)
        )

    @cached_property
    def planned(self) -> ContextSequence:
        """This rank's part of the case's documents, which are planned over the ranks by their
        attention alone."""
        one = self.case.attention
        layers = layers_alike(1, one.heads * one.head_dim, one.heads, one.kv_heads, 0)
        ids = torch.arange(len(one.documents)).repeat_interleave(torch.tensor(one.documents))
        batch = {"tokens": ids[None], "documents": ids[None]}
        return shard_batch(batch, self.team.planned, costs=DocumentCosts(layers, 0.0))[1]

    def _planned(self) -> Layout:
        sequence, origin = self.planned, self.planned.origin
        assert origin is not None
        mine = sequence.layout.tokens[0, sequence.group.rank]
        found = torch.where(mine < 0, -1, origin.columns[0, mine.clamp(min=0)])
        held = self.team.gather([-1] if origin.empty else found.tolist())
        most = max(map(len, held))
        rows = torch.tensor([[*one, *[-1] * (most - len(one))] for one in held])
        return Layout(rows[None], self.case.mask.seqlen_k, sequence.layout.block)


class Attention(NamedTuple):
    """A baseline's attention, prepared on this rank for one case."""

    # This rank's output, differentiable, of its q (B, n, H, D), k and v (B, n, K, D).
    call: Callable[..., Tensor]
    traffic: Traffic  # the bytes that the busiest rank sends
    # Neighbouring ranks that compute the same tokens, each for a part of the heads: they work
    # equally.
    together: int = 1


@dataclass(frozen=True)
class ContextBaseline(Baseline):
    """An implementation of attention over several devices, with one layout of the sequence.

    A separable one computes by the functions of flashtrain.distributed.context.local_attention:
    communication is timed alone by replacing the kernels that they call by functions that return
    zeros.
    """

    separable: ClassVar[bool] = True

    name: str
    way: str  # the name of the context-parallel method, for the column `way`
    layout: str  # the name of a layout, as in flashtrain.distributed.context.layouts.LAYOUTS

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.way}, {self.layout}"

    def columns(self, case: ContextCase) -> Row:
        return {
            "implementation": self.title,
            "way": self.way,
            "layout": self.layout,
            **case.columns(),
        }

    @abstractmethod
    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        """Return this rank's attention, prepared for the case of `place`; of q (B, n, H, D), k and
        v (B, n, K, D) only shape and dtype are read."""
