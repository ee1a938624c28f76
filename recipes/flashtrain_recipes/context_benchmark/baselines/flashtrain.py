"""flashtrain.distributed.context as baselines: each of its methods in each of its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

from torch import Tensor

from flashtrain.distributed.context.attention import SharedAttention
from flashtrain.distributed.context.methods import ULYSSES, choose_method
from flashtrain.distributed.context.traffic import Sizes
from flashtrain.errors import UserError
from flashtrain.settings.options import ContextLayout
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.settings import METHODS


class Flashtrain(ContextBaseline):
    """flashtrain's attention by one context-parallel method in one layout."""

    def refuses(self, case: ContextCase) -> str | None:
        one = case.attention
        try:
            choose_method(self.way, Sizes(case.degree, one.heads, one.kv_heads, one.head_dim))
        except UserError as error:
            return str(error)
        return None

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        layout = place.layout(self.layout)
        shared = SharedAttention(
            place.mask, layout, place.team.group, q, k, method=self.way, dropout=False
        )
        call = partial(shared.__call__, scale=place.case.attention.scale)
        return Attention(call, shared.choice.traffic, shared.choice.heads_degree)


def baselines(
    methods: Sequence[str] | None, layouts: Sequence[str] | None
) -> list[ContextBaseline]:
    """Return a baseline for each method and layout; for ulysses, the same in all
    layouts, only the first.

    Args:
        methods, layouts: the values of benchmark.methods and benchmark.layouts; None: all.
    """
    chosen = [layout for layout in get_args(ContextLayout) if layouts is None or layout in layouts]
    return [
        Flashtrain("flashtrain", way, layout)
        for way in METHODS
        if methods is None or way in methods
        for layout in (chosen[:1] if way == ULYSSES else chosen)
    ]
