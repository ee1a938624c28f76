"""flashtrain.distributed.context as baselines: each of its methods in each of its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

from torch import Tensor
from torch.nn.functional import pad

from flashtrain.distributed.context.attention import SharedAttention
from flashtrain.distributed.context.methods import AUTO, ULYSSES, choose_method
from flashtrain.distributed.context.traffic import Sizes
from flashtrain.errors import UserError
from flashtrain.settings.options import ContextLayout
from flashtrain_kernels import masks
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.settings import METHODS, PLANNED


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


class Planned(Flashtrain):
    """flashtrain's attention to documents that are planned over the ranks."""

    def refuses(self, case: ContextCase) -> str | None:
        return None if case.attention.documents else "no documents"

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        sequence, layout = place.planned, place.layout(self.layout)
        held, documents = sequence.held, sequence.whole("documents", q.device)
        assert documents is not None
        mask = masks.document(documents, causal=True)
        given = mask, sequence.layout, sequence.group, q[:, :held], k[:, :held]
        shared = SharedAttention(*given, method=self.way, dropout=False)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = (x[:, :held].contiguous() for x in (q, k, v))
            out = shared(*own, scale=place.case.attention.scale)
            return pad(out, (0, 0, 0, 0, 0, layout.held - held))

        return Attention(call, shared.choice.traffic)


def baselines(
    methods: Sequence[str] | None, layouts: Sequence[str] | None
) -> list[ContextBaseline]:
    """Return a baseline for each method and layout; for ulysses, the same in all
    layouts, only the first.

    Args:
        methods, layouts: the values of benchmark.methods and benchmark.layouts; None: all.
    """
    chosen = [layout for layout in get_args(ContextLayout) if layouts is None or layout in layouts]
    planned: list[ContextBaseline] = [Planned("flashtrain", AUTO, PLANNED)]
    return [
        *(planned if layouts is not None and PLANNED in layouts else ()),
        *(
            Flashtrain("flashtrain", way, layout)
            for way in METHODS
            if methods is None or way in methods
            for layout in (chosen[:1] if way == ULYSSES else chosen)
        ),
    ]
