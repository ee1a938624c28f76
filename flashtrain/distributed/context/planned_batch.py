"""This rank's documents of a micro-batch that is planned by documents (document_plan.py), as a
batch of one row that its group shares.

Shapes: B rows and S tokens a row of the micro-batch, G tokens of the group's documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.balance import Run
from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.document_plan import Place, plan_documents
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
    first, ranks = plan.groups[group.rank]
    mine = [one for one in range(len(lengths)) if 0 <= plan.places[one].first - first < ranks]
    sizes = lengths[mine] if mine else np.ones(1, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    shift = (begins[mine] if mine else starts) - starts
    tokens = torch.from_numpy(np.repeat(shift, sizes) + np.arange(sizes.sum()))
    numbers = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))[None]
    own: dict[str, Any] = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == ids.shape:
            own[name] = x.flatten(0, 1)[tokens.to(x.device)][None]
    if documents in own:
        own[documents] = numbers.to(own[documents])
    if not mine and LABELS in own:
        own[LABELS] = torch.full_like(own[LABELS], IGNORED)
    bounds = torch.from_numpy(np.append(starts, len(tokens)))
    own |= {name: bounds.to(batch[name]) for name in BOUNDS if name in batch}
    labels = int((batch[LABELS] != IGNORED).sum()) if LABELS in batch else ids.numel()
    ends = torch.zeros(1, len(tokens), dtype=torch.bool).index_fill_(1, bounds[1:] - 1, True)
    origin = Origin(group, tokens[None] % length, ends, labels, not mine)
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    places = [plan.places[one] for one in mine] or [Place(first, ranks)]
    for place, start, size in zip(places, starts.tolist(), sizes.tolist(), strict=True):
        for rank, of_rank in enumerate(even_runs(layout, size, place.ranks), place.first - first):
            runs[rank] += [(start + begin, start + end) for begin, end in of_rank]
    longest = max(end - begin for of_rank in runs for begin, end in of_rank)
    return own, group.block(ranks), layout_of([runs], len(tokens), longest), origin
