"""The interface of an implementation of attention over several devices, and the ranks that a case
is computed on (Place).

B batch (1), n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.document_plan import DocumentPlan, plan_documents
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.planned_batch import Share, share_of
from flashtrain.distributed.context.traffic import Traffic
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import FeedForwardSpec, LayerSpec
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
    def plan(self) -> DocumentPlan:
        """The plan of the case's documents over the ranks, by their attention alone."""
        one = self.case.attention
        spec = AttentionSpec(one.heads, one.kv_heads, one.head_dim)
        layers = [LayerSpec(spec, FeedForwardSpec(0))]
        return plan_documents(one.documents, self.case.degree, DocumentCosts(layers, 0.0))

    def share(self, rank: int) -> Share:
        """Return what a rank's group holds of the planned documents."""
        return share_of(self.plan, np.array(self.case.attention.documents), rank, "zigzag")

    def _planned(self) -> Layout:
        shares = [self.share(rank) for rank in range(self.case.degree)]
        held = [
            torch.full((1,), -1) if one.empty else one.layout.tokens[0, rank - one.place.first]
            for rank, one in enumerate(shares)
        ]
        tokens = torch.full((1, len(held), max(map(len, held))), -1)
        for rank, (mine, one) in enumerate(zip(held, shares, strict=True)):
            tokens[0, rank, : len(mine)] = torch.where(mine < 0, -1, one.tokens[mine.clamp(min=0)])
        return Layout(tokens, self.case.mask.seqlen_k, max(one.layout.block for one in shares))


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

    It must compute by the functions of flashtrain.distributed.context.local_attention:
    when communication is timed alone, the kernels that they call are replaced by
    functions that return zeros.
    """

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
