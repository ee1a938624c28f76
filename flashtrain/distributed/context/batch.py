"""Sharding a batch among the ranks that share its sequences.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.methods import AUTO
from flashtrain.distributed.context.planned_batch import LABELS, own_documents
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError
from flashtrain_kernels import masks
from flashtrain_kernels.loss_head import IGNORED

TOKENS = ("tokens", "input_ids")  # our batches', transformers'


def shard_batch(
    batch: Any,
    group: ContextGroup,
    *,
    documents: str | None = "documents",
    layout: str = "balanced",
    method: str = AUTO,
    costs: DocumentCosts | None = None,
) -> tuple[dict[str, Any], ContextSequence]:
    """Shard the sequences of a batch among the ranks of a group.

    A rank whose tokens have no label gets one with weight 0, because every rank must take
    part in the backward pass.

    Args:
        batch: a dictionary, the same on all ranks of the group, whose "tokens" or "input_ids" are
            (B, S). Its tensors (B, S, ...) are sharded, padded with 0 ("labels" with -100). Other
            entries are passed on unchanged.
        group: the ranks that share the sequence.
        documents: the key of the document ids (B, S), by which the work is balanced. A batch
            without this key is balanced by transformers' cu_seq_lens_q, or by position_ids that
            restart. None: ignore documents.
        layout: "balanced", "zigzag" or "contiguous" (layouts.LAYOUTS).
        method: the context-parallel method.
        costs: with them, the documents of all rows are planned over the ranks (document_plan.py);
            no token may see another document. A batch without documents is sharded as ever.

    Returns:
        (this rank's part of the batch, the sharded sequence).

    Raises:
        UserError: the batch has no tokens.
    """
    tokens = _tokens(batch)
    length, size, origin = tokens.shape[1], tokens.shape[0] * tokens.shape[1], None
    ids = None if documents is None else documents_in(batch, documents, length)
    if costs is not None and ids is not None:
        batch, group, sharding, origin = own_documents(
            batch, ids.expand(tokens.shape), group, costs, documents=documents, layout=layout
        )
        tokens = _tokens(batch)
    else:
        # Attention is exact for any mask; the work is balanced for a causal one.
        sharding = LAYOUTS[layout](
            masks.causal(length) if ids is None else masks.document(ids, causal=True), group.size
        )
    part: dict[str, Any] = dict(batch)
    whole: dict[str, Tensor] = {}
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == tokens.shape[:2]:
            whole[name] = x
            part[name] = sharding.shard(x, group.rank, fill=IGNORED if name == LABELS else 0)
    counted = _counted(whole.get(LABELS), part, sharding, group)
    if origin is not None:
        counted = (0 if origin.empty else counted[0]), origin.labels
    return part, ContextSequence(
        sharding, group, method=method, whole=whole, counted=counted, tokens=size, origin=origin
    )


def check_same_batch(batch: Any, group: ContextGroup) -> None:
    """Check that all ranks of a group got the same tokens. Every rank must call this function.

    Args:
        batch: as in `shard_batch`.
        group: the ranks that share the sequence.

    Raises:
        UserError: the ranks got different tokens.
    """
    device = group.device
    tokens = _tokens(batch).to(device=device, dtype=torch.float64)
    # A sum that depends on the order of the tokens; equal tokens give equal bits on every rank.
    order = torch.arange(1, tokens.numel() + 1, device=device, dtype=torch.float64).sin()
    mine = torch.stack((tokens.new_tensor(tokens.shape[1]), tokens.sum(), tokens.flatten() @ order))
    found = [torch.empty_like(mine) for _ in range(group.size)]
    torch.distributed.all_gather(found, mine, group=group.group)
    other = next((rank for rank, one in enumerate(found) if not torch.equal(one, found[0])), None)
    if other is not None:
        raise UserError(
            f"ranks {group.ranks[0]} and {group.ranks[other]} share a sequence but got "
            "different batches. Make the sampler with the strategy's "
            "distributed_sampler_kwargs (num_replicas is the number of data ranks, not of "
            "devices), and use the same seed on every rank."
        )


def _tokens(batch: Any) -> Tensor:
    given = batch if isinstance(batch, Mapping) else {}
    tokens = next((given[name] for name in TOKENS if name in given), None)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise UserError(
            f"a batch of type {type(batch).__name__} ({', '.join(map(str, given))}) under context "
            "parallelism. Expected a dictionary with 'tokens' or 'input_ids' (B, S)."
        )
    return tokens


def documents_in(batch: Mapping[str, Any], name: str, length: int) -> Tensor | None:
    """Document ids (B, S) on the host; None where the batch says nothing of documents."""
    ids, bounds, positions = (batch.get(key) for key in (name, "cu_seq_lens_q", "position_ids"))
    if isinstance(ids, Tensor):
        return ids.cpu()
    if isinstance(bounds, Tensor) and bounds.dim() == 1 and int(bounds[-1]) % length == 0:
        ends = torch.arange(int(bounds[-1]))
        return torch.bucketize(ends, bounds.cpu().long(), right=True).view(-1, length)
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == length:
        breaks = positions.cpu().diff(dim=1) != 1
        if breaks.any():
            return torch.nn.functional.pad(breaks.cumsum(1), (1, 0))
    return None


def _counted(
    labels: Tensor | None, part: dict[str, Any], layout: Layout, group: ContextGroup
) -> tuple[int, int]:
    """Return the numbers of labels that are not ignored, of this rank and of the whole group;
    without labels, of tokens. A rank that has no label gets one in `part`."""
    if labels is None:
        return int((layout.tokens[:, group.rank] >= 0).sum()), layout.tokens.shape[
            0
        ] * layout.seqlen
    here = part[LABELS]
    count = int((here != IGNORED).sum())
    if count == 0:
        part[LABELS] = here.index_fill(1, torch.tensor([0], device=here.device), 0)
    return count, int((labels != IGNORED).sum())
