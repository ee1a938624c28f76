"""Dealing a batch to the ranks that share its sequences.

B batch, S sequence, n tokens a rank holds, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout, make_layout
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError
from flashtrain_kernels import Mask, masks

IGNORED = -100


class BatchNames(NamedTuple):
    """The names of a batch's tensors. tokens: which says how long the sequence is. labels: in which -100 counts for
    nothing. documents: ids by whose boundaries the work is balanced, where the batch has them."""

    tokens: str = "tokens"
    labels: str = "labels"
    documents: str | None = "documents"


def deal_batch(
    batch: Any,
    group: ContextGroup,
    names: BatchNames,
    *,
    layout: str = "balanced",
    way: str = "auto",
    causal: bool = True,
) -> tuple[dict[str, Any], ContextSequence]:
    """This rank's part of a batch, and the sequence it is a part of.

    batch: the same mapping of names to tensors on all ranks of the group. Tensors (B, S, ...) are dealt, others stay
    whole. causal: what the work is balanced for; attention is exact for any mask. Labels of padding are -100, all else
    of it is 0. A rank without a single label computes one, which is weighted by 0: it must take part in the backward.
    Raises UserError for a batch without the named tensors.
    """
    tokens = _tokens(batch, names)
    length = tokens.shape[1]
    spread = _cost_mask(batch, names, length, causal)
    dealt_by = make_layout(layout, spread, group.size)
    part: dict[str, Any] = dict(batch)
    whole: dict[str, Tensor] = {}
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == tokens.shape[:2]:
            whole[name] = x
            part[name] = dealt_by.shard(x, group.rank, fill=IGNORED if name == names.labels else 0)
    counted = _counted(whole.get(names.labels), part, names, dealt_by, group)
    return part, ContextSequence(
        dealt_by, group, way=way, whole=whole, counted=counted, tokens=tokens.shape[0] * length
    )


def _tokens(batch: Any, names: BatchNames) -> Tensor:
    if not isinstance(batch, Mapping):
        raise UserError(
            f"a batch of type {type(batch).__name__} under context parallelism. Possible: a dictionary, whose "
            f"'{names.tokens}' (B, S) say how long the sequence is."
        )
    tokens = batch.get(names.tokens)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise UserError(
            f"a batch without '{names.tokens}' (B, S): it has {', '.join(map(str, batch)) or 'nothing'}. Possible: say "
            "which of them holds the tokens (ContextParallelStrategy(tokens=...))."
        )
    return tokens


def _cost_mask(batch: Mapping[str, Any], names: BatchNames, length: int, causal: bool) -> Mask:
    documents = batch.get(names.documents) if names.documents is not None else None
    if isinstance(documents, Tensor):
        return masks.document(documents.cpu(), causal=causal)
    return masks.causal(length) if causal else masks.full(length)


def _counted(
    labels: Tensor | None, part: dict[str, Any], names: BatchNames, layout: Layout, group: ContextGroup
) -> tuple[int, int]:
    """How many labels count, here and on all ranks of the group; without labels, how many tokens are real."""
    if labels is None:
        return int((layout.tokens[:, group.rank] >= 0).sum()), layout.tokens.shape[0] * layout.seqlen
    here = part[names.labels]
    count = int((here != IGNORED).sum())
    if count == 0:
        part[names.labels] = here.index_fill(1, torch.tensor([0], device=here.device), 0)
    return count, int((labels != IGNORED).sum())


def same_everywhere(batch: Mapping[str, Any], names: BatchNames, group: ContextGroup, device: torch.device) -> None:
    """UserError unless every rank of the group was given the same tokens; every rank must call it."""
    tokens = _tokens(batch, names).to(device=device, dtype=torch.float64)
    # A sum that the order of the tokens enters; its bits are compared, so every rank computes it alike.
    order = torch.arange(1, tokens.numel() + 1, device=device, dtype=torch.float64).sin()
    mine = torch.stack((tokens.new_tensor(tokens.shape[1]), tokens.sum(), tokens.flatten() @ order))
    found = [torch.empty_like(mine) for _ in range(group.size)]
    torch.distributed.all_gather(found, mine, group=group.group)
    other = next((rank for rank, one in enumerate(found) if not torch.equal(one, found[0])), None)
    if other is not None:
        raise UserError(
            f"ranks {group.ranks[0]} and {group.ranks[other]} share a sequence but were given different batches. "
            "Possible: a sampler with the strategy's distributed_sampler_kwargs (num_replicas is the number of data "
            "ranks, not of devices), and the same seed on every rank."
        )
