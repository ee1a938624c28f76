"""This rank's documents of a micro-batch that is planned by documents (document_plan.py), as a
batch of one row that its group shares.

Shapes: B rows and S tokens a row of the micro-batch, G tokens of the group's documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.document_plan import DocumentPlan, Place, plan_documents
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout, layout_of
from flashtrain.distributed.context.layouts import even_runs
from flashtrain_kernels.loss_head import IGNORED

LABELS = "labels"
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # transformers' bounds of packed documents


class Origin(NamedTuple):
    """Where the tokens of a group's row come from."""

    group: ContextGroup  # of all ranks that share the micro-batch
    columns: Tensor  # (1, G) int64, in their rows
    ends: Tensor  # (1, G) bool, whether a token is the last of its document
    labels: int  # of the micro-batch, not ignored; of one without labels, its tokens
    empty: bool  # whether no document was left for this rank


def own_documents(
    batch: dict[str, Any],
    ids: Tensor,
    group: ContextGroup,
    costs: DocumentCosts,
    *,
    documents: str | None,
    layout: str,
) -> tuple[dict[str, Any], ContextGroup, Layout, Origin]:
    """Plan a micro-batch's documents, and gather those that this rank's group holds, in order.

    A rank for which no document is left computes the first token, without a label.

    Args:
        batch: tensors (B, S, ...), which are taken apart, and other entries.
        ids: (B, S) on the host, document ids.
        group: all ranks that share the micro-batch.
        costs: the seconds of a document.
        documents: the key of document ids in the batch, numbered anew.
        layout: how a document is divided: "contiguous", else zigzag.

    Returns:
        (the batch with tensors (1, G, ...), the ranks that share it, their layout, its origin).
    """
    length = ids.shape[1]
    begins = np.flatnonzero(np.diff(ids.numpy(), axis=1, prepend=ids[:, :1].numpy() - 1))
    lengths = np.diff(begins, append=ids.numel())
    plan = plan_documents(lengths.tolist(), group.size, costs)
    block = plan.groups[group.rank]
    numbered = range(len(lengths))
    mine = [one for one in numbered if block.first <= plan.places[one].first < sum(block)]
    sizes = lengths[mine] if mine else np.ones(1, dtype=np.int64)
    firsts = begins[mine] if mine else np.zeros(1, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    tokens = torch.from_numpy(np.repeat(firsts - starts, sizes) + np.arange(sizes.sum()))
    numbers = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))[None]
    own: dict[str, Any] = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == ids.shape:
            own[name] = x.flatten(0, 1)[tokens.to(x.device)][None]
    if documents in own:
        own[documents] = numbers.to(own[documents])
    if not mine and LABELS in own:
        own[LABELS] = torch.full_like(own[LABELS], IGNORED)
    for name in BOUNDS:
        if name in own:
            own[name] = torch.from_numpy(np.append(starts, sizes.sum())).to(own[name])
    ends = torch.zeros(numbers.shape, dtype=torch.bool)
    ends[0, starts + sizes - 1] = True
    labels = int((batch[LABELS] != IGNORED).sum()) if LABELS in batch else ids.numel()
    origin = Origin(group, tokens[None] % length, ends, labels, not mine)
    return own, group.block(block.ranks), _layout(plan, block, mine, sizes, layout), origin


def _layout(
    plan: DocumentPlan, block: Place, mine: list[int], sizes: np.ndarray, layout: str
) -> Layout:
    """Return which rank of a block holds which tokens of the row of its documents."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(block.ranks)]
    places = [plan.places[one] for one in mine] or [block]
    begin, longest = 0, 0
    for (first, count), size in zip(places, sizes.tolist(), strict=True):
        for rank, of_rank in enumerate(even_runs(layout, size, count), first - block.first):
            runs[rank] += [(begin + one, begin + past) for one, past in of_rank]
            longest = max(longest, *(past - one for one, past in of_rank))
        begin += size
    return layout_of([runs], begin, longest)
