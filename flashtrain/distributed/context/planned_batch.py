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


class Share(NamedTuple):
    """What a group holds of documents that lie end to end."""

    place: Place  # the group
    tokens: Tensor  # (G,) int64, where the group's tokens lie, ascending
    documents: Tensor  # (1, G) int64, their documents, from 0
    layout: Layout  # which rank of the group holds which of the G tokens
    empty: bool  # whether no document was left: it is the first token, as a stand-in


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
    share = share_of(plan, lengths, group.rank, layout)
    own: dict[str, Any] = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == ids.shape:
            own[name] = x.flatten(0, 1)[share.tokens.to(x.device)][None]
    if documents in own:
        own[documents] = share.documents.to(own[documents])
    if share.empty and LABELS in own:
        own[LABELS] = torch.full_like(own[LABELS], IGNORED)
    ends = torch.nn.functional.pad(share.documents.diff(dim=1) != 0, (0, 1), value=True)
    bounds = torch.nn.functional.pad(ends[0].nonzero()[:, 0] + 1, (1, 0))
    own |= {name: bounds.to(batch[name]) for name in BOUNDS if name in batch}
    labels = int((batch[LABELS] != IGNORED).sum()) if LABELS in batch else ids.numel()
    origin = Origin(group, share.tokens[None] % length, ends, labels, share.empty)
    return own, group.block(share.place.ranks), share.layout, origin


def share_of(plan: DocumentPlan, lengths: np.ndarray, rank: int, layout: str) -> Share:
    """Return what the group of a rank holds of documents that lie end to end.

    Args:
        plan, lengths: of all documents, in their order.
        rank: one of the plan's ranks.
        layout: how a document is divided: "contiguous", else zigzag.
    """
    place, numbers = plan.groups[rank], range(len(lengths))
    mine = [one for one in numbers if place.first <= plan.places[one].first < sum(place)]
    sizes = lengths[mine] if mine else np.ones(1, dtype=np.int64)
    firsts = (np.cumsum(lengths) - lengths)[mine] if mine else np.zeros(1, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    tokens = torch.from_numpy(np.repeat(firsts - starts, sizes) + np.arange(sizes.sum()))
    ids = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))[None]
    runs: list[list[tuple[int, int]]] = [[] for _ in range(place.ranks)]
    places, longest = [plan.places[one] for one in mine] or [place], 0
    for (first, ranks), begin, size in zip(places, starts.tolist(), sizes.tolist(), strict=True):
        for number, of_rank in enumerate(even_runs(layout, size, ranks), first - place.first):
            runs[number] += [(begin + one, begin + past) for one, past in of_rank]
            longest = max(longest, *(past - one for one, past in of_rank))
    return Share(place, tokens, ids, layout_of([runs], len(tokens), longest), not mine)
