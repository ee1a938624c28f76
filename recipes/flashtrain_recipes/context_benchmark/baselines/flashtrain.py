"""flashtrain.distributed.context, by each of its methods in each of its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

from torch import Tensor

from flashtrain.distributed.context.attention import SharedAttention
from flashtrain.distributed.context.ways import ALL_TO_ALL, choose_way
from flashtrain.errors import UserError
from flashtrain.settings.options import ContextLayout
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.settings import WAYS


class Flashtrain(ContextBaseline):
    """One method in one layout."""

    def refuses(self, case: ContextCase) -> str | None:
        one = case.attention
        sizes = {"heads": one.heads, "kv_heads": one.kv_heads, "head_dim": one.head_dim}
        try:
            choose_way(self.way, degree=case.degree, held=1, **sizes)
        except UserError as error:
            return str(error)
        return None

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        layout = place.layout(self.layout)
        shared = SharedAttention(place.mask, layout, place.team.group, q, k, way=self.way, dropout=False)
        call = partial(shared.__call__, softmax_scale=place.case.attention.scale)
        return Attention(call, shared.choice.traffic, shared.choice.heads_degree)


def baselines(ways: Sequence[str] | None, layouts: Sequence[str] | None) -> list[ContextBaseline]:
    """Return every method in every layout; all-to-all, which computes alike in each layout, in the first only."""
    chosen = [layout for layout in get_args(ContextLayout) if layouts is None or layout in layouts]
    return [
        Flashtrain("flashtrain", way, layout)
        for way in WAYS
        if ways is None or way in ways
        for layout in (chosen[:1] if way == ALL_TO_ALL else chosen)
    ]
