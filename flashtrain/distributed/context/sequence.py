"""Sharding a batch among the ranks that share its sequences.

AttentionCheck watches the first step of each kind: a model that computes attention by itself (transformers',
nn.MultiheadAttention, scaled_dot_product_attention) would see only its own device's tokens, and nothing else in a
training shows that its loss is wrong.

B batch, S sequence, n tokens a rank holds, R ranks, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.distributed.context.attention import CONTEXT_ATTENTION, SharedAttention, whole_mask
from flashtrain.distributed.context.exchange import ContextGroup
from flashtrain.distributed.context.layout import Layout, make_layout
from flashtrain.distributed.context.ways import AUTO
from flashtrain.errors import UserError
from flashtrain_kernels import Mask, masks

MASKS_KEPT = 4  # prepared masks in memory: layers of one model rarely use more
IGNORED = -100
# The dimension, from the end, of the keys in an operator's tensor of this name. flash-attn's layout, and ours:
# (B, S, H, D) or (T, H, D), packed tensors with one dimension more.
KEYS = {"key": -3, "k": -3, "kv": -4, "qkv": -4}
# torch's own: (B, H, S, D), or (B, S, E).
TORCH_ATTENTION = ("aten::_scaled_dot_product", "aten::_native_multi_head_attention")
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class ContextSequence:
    """A batch sharded by a layout, with the methods that models call (models/cache.py).

    Args:
        layout: which rank holds which tokens.
        group: the ranks that share the sequence.
        way: the context-parallel method.
        whole: the unsharded tensors (B, S, ...) of the batch, by name.
        counted: labels that are not ignored, on this rank and on all R.
        tokens: of the whole batch, B * S.
        weigh: counts -> `weight`, the factor of this rank's mean loss with which the mean over ranks is the mean over
            all labels; None: over the R ranks (pass it if other ranks hold other samples).
    """

    def __init__(
        self,
        layout: Layout,
        group: ContextGroup,
        *,
        way: str = AUTO,
        whole: Mapping[str, Tensor] | None = None,
        counted: tuple[int, int] = (1, 1),
        tokens: int = 0,
        weigh: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.layout = layout
        self.group = group
        self.way = way
        self.tokens = tokens
        self._weigh = weigh or self._weight_in_group
        self.weight: float | Tensor = self._weigh(*counted)
        self._without_labels = counted[0] == 0
        self.refuses_own_part = True  # ... a user may say that attention to a device's own part is meant
        self.is_weighted = False  # whether the step weighted a mean itself, even if only to log it
        # The loss that it took it of, where that has a graph. Weakly: the graph holds this sequence, and a circle
        # through a graph is never freed, nor what else the graph holds (the model, under FSDP2).
        self._unweighted: weakref.ref[Tensor] | None = None
        self.explanation: str | None = None
        self._whole = dict(whole or {})
        self._positions: Tensor | None = None
        self._ready: dict[tuple, tuple[Any, SharedAttention]] = {}

    @property
    def length(self) -> int:
        """S."""
        return self.layout.seqlen

    @property
    def held(self) -> int:
        """n, padding included."""
        return self.layout.held

    @torch.compiler.disable
    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(Bl, n) int64: the positions of this rank's tokens in the sequence."""
        self._check(tokens)
        if self._positions is None or self._positions.device != device:
            self._positions = self.layout.positions(self.group.rank).to(device)
        return self._positions

    @torch.compiler.disable
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Mask | None,
        dropout: float,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See models/cache.py; the same mask is made ready once for all layers."""
        self._check(q.shape[1])
        # The cache's key has the id of the mask's tensor; the entry holds the tensor, so that no other gets this id.
        held = None if mask is None else mask.queries
        causal = causal and mask is None
        key = (id(held), causal, window, q.shape, k.shape, q.dtype, dropout > 0, softcap > 0)
        if key not in self._ready:
            made = whole_mask(self.layout.seqlen, q.device, mask=mask, causal=causal, window=window)
            shared = SharedAttention(
                made, self.layout, self.group, q, k, way=self.way, dropout=dropout > 0, softcap=softcap > 0
            )
            while len(self._ready) >= MASKS_KEPT:
                del self._ready[next(iter(self._ready))]
            self._ready[key] = held, shared
            self.explanation = shared.choice.reason
        shared = self._ready[key][1]
        return shared(q, k, v, softmax_scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout)

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        """The unsharded tensor of that name, on the device; None if the batch has none."""
        if name not in self._whole:
            return None
        self._whole[name] = self._whole[name].to(device, non_blocking=True)
        return self._whole[name]

    @torch.compiler.disable
    def gathered(self, part: Tensor) -> Tensor:
        """See models/cache.py."""
        self._check(part.shape[1])
        mine = part.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.group.size)]
        dist.all_gather(parts, mine, group=self.group.group)
        return self.layout.unshard(parts)

    @torch.compiler.disable
    def summed(self, x: Tensor) -> Tensor:
        """See models/cache.py."""
        return _Summed.apply(x, self.group.group)

    @torch.compiler.disable
    def dealt(self, x: Tensor) -> Tensor:
        """See models/cache.py; 0 for padding."""
        return self.layout.shard(x, self.group.rank)

    @torch.compiler.disable
    def next_labels(self, labels: Tensor) -> Tensor:
        """See models/cache.py. A rank without labels computes one, with weight 0."""
        if self._without_labels:  # its first ones are stand-ins (deal_batch)
            labels = labels.index_fill(1, torch.zeros(1, dtype=torch.int64, device=labels.device), IGNORED)
        whole = torch.nn.functional.pad(self.gathered(labels)[:, 1:], (0, 1), value=IGNORED)
        mine = self.layout.shard(whole, self.group.rank, fill=IGNORED)
        counted, together = ((x != IGNORED).sum().double() for x in (mine, whole))
        weight = self._weigh(counted, together)
        self.weight = weight if labels.device.type == "cpu" else weight.float()
        return torch.cat((torch.where(counted == 0, 0, mine[:, :1]), mine[:, 1:]), 1)

    def _weight_in_group(self, here: Any, together: Any) -> Any:
        share = together.clamp(min=1) if isinstance(together, Tensor) else max(1, together)
        return self.group.size * here / share

    def weighted(self, loss: Tensor) -> Tensor:
        """See models/cache.py."""
        self.is_weighted = True
        if loss.requires_grad:
            self._unweighted = weakref.ref(loss)
        return loss * self.weight

    def has_weighted(self, loss: Any) -> bool:
        """Whether the step made this loss from a mean that it weighted itself, and did not only log that mean."""
        return self._unweighted is not None and self._unweighted() is not loss

    def is_own_part(self, tokens: int) -> bool:
        """Whether this number of tokens is that of this rank's part, of one row (give or take a token) or of all."""
        held, rows = self.layout.held, max(1, self.tokens // self.layout.seqlen)
        return abs(tokens - held) <= 1 or tokens == rows * held

    def refuse_own_part(self, keys: int, what: str) -> None:
        """See models/cache.py."""
        if self.refuses_own_part and self.layout.degree > 1 and self.is_own_part(keys):
            raise UserError(
                f"{what} of {keys} keys under context parallelism, where {self.layout.degree} devices hold "
                f"{self.layout.held} of a sequence's {self.layout.seqlen} tokens each: a token would see only its "
                "own device's part. Use flashtrain.Attention instead, or another strategy (fsdp, ddp), or if this is "
                "intended ContextParallelStrategy(check_attention=False)."
            )

    def _check(self, tokens: int) -> None:
        if tokens != self.layout.held:
            raise UserError(
                f"this rank got {tokens} tokens, expected {self.layout.held} of {self.layout.seqlen}. Do not slice or "
                "join the batch after the strategy has sharded it; shift labels beforehand."
            )


class _Summed(torch.autograd.Function):
    """The sum of all ranks' x; a gradient of each rank's is one of every x in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, summed = group, x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _Summed.forward(ctx, dout, ctx.group), None


class BatchNames(NamedTuple):
    """The names of a batch's tensors.

    Attributes:
        tokens: (B, S, ...), which gives the sequence's length.
        labels: (B, S), with -100 for ignored.
        documents: document ids, by which the work is balanced. A batch without them is balanced by transformers'
            cu_seq_lens_q, or by position_ids that restart; None: by neither.
    """

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
    weigh: Callable[[Any, Any], Any] | None = None,
) -> tuple[dict[str, Any], ContextSequence]:
    """(this rank's part of a batch, the sharded sequence).

    A rank without any label computes one, with weight 0, because it must take part in the backward.

    Args:
        batch: tensors by name, the same on all ranks of the group. Tensors (B, S, ...) are sharded; their padding is
            0, that of labels -100. Others stay whole.
        group, names, layout, way, weigh: as ContextSequence's and ContextParallelStrategy's.
        causal: what the work is balanced for; attention is exact for any mask.

    Raises:
        UserError: the batch lacks the named tensors.
    """
    tokens = _tokens(batch, names)
    length = tokens.shape[1]
    sharding = make_layout(layout, _cost_mask(batch, names, length, causal), group.size)
    part: dict[str, Any] = dict(batch)
    whole: dict[str, Tensor] = {}
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == tokens.shape[:2]:
            whole[name] = x
            part[name] = sharding.shard(x, group.rank, fill=IGNORED if name == names.labels else 0)
    counted = _counted(whole.get(names.labels), part, names, sharding, group)
    size = tokens.shape[0] * length
    return part, ContextSequence(sharding, group, way=way, whole=whole, counted=counted, tokens=size, weigh=weigh)


def _tokens(batch: Any, names: BatchNames) -> Tensor:
    if not isinstance(batch, Mapping):
        raise UserError(
            f"a batch of type {type(batch).__name__} under context parallelism. Expected a dictionary with "
            f"'{names.tokens}' (B, S)."
        )
    tokens = batch.get(names.tokens)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise UserError(
            f"a batch without '{names.tokens}' (B, S): it has {', '.join(map(str, batch)) or 'nothing'}. Name its "
            "tokens: ContextParallelStrategy(tokens=...)."
        )
    return tokens


def _cost_mask(batch: Mapping[str, Any], names: BatchNames, length: int, causal: bool) -> Mask:
    documents = None if names.documents is None else _documents(batch, names.documents, length)
    if documents is not None:
        return masks.document(documents, causal=causal)
    return masks.causal(length) if causal else masks.full(length)


def _documents(batch: Mapping[str, Any], name: str, length: int) -> Tensor | None:
    """(B, S) document ids on the host."""
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
    labels: Tensor | None, part: dict[str, Any], names: BatchNames, layout: Layout, group: ContextGroup
) -> tuple[int, int]:
    """Labels that are not ignored, here and on all ranks of the group; without labels, tokens without padding."""
    if labels is None:
        return int((layout.tokens[:, group.rank] >= 0).sum()), layout.tokens.shape[0] * layout.seqlen
    here = part[names.labels]
    count = int((here != IGNORED).sum())
    if count == 0:
        part[names.labels] = here.index_fill(1, torch.tensor([0], device=here.device), 0)
    return count, int((labels != IGNORED).sum())


def same_everywhere(batch: Mapping[str, Any], names: BatchNames, group: ContextGroup, device: torch.device) -> None:
    """Raise UserError unless all ranks of the group got the same tokens. Every rank must call it."""
    tokens = _tokens(batch, names).to(device=device, dtype=torch.float64)
    # A sum that depends on the order of the tokens; equal tokens give equal bits on every rank.
    order = torch.arange(1, tokens.numel() + 1, device=device, dtype=torch.float64).sin()
    mine = torch.stack((tokens.new_tensor(tokens.shape[1]), tokens.sum(), tokens.flatten() @ order))
    found = [torch.empty_like(mine) for _ in range(group.size)]
    torch.distributed.all_gather(found, mine, group=group.group)
    other = next((rank for rank, one in enumerate(found) if not torch.equal(one, found[0])), None)
    if other is not None:
        raise UserError(
            f"ranks {group.ranks[0]} and {group.ranks[other]} share a sequence but got different batches. Make the "
            "sampler with the strategy's distributed_sampler_kwargs (num_replicas is the number of data ranks, not of "
            "devices), and use the same seed on every rank."
        )


class AttentionCheck(TorchDispatchMode):
    """A context that counts shared attention, and rejects attention to one device's own part of the sequence.

    It rejects operators with as many keys as this device holds tokens: torch's, ours, flash-attn's, flex attention, and
    softmax over a matrix of tokens by tokens. It does not see what torch.compile fused. Every torch call costs some
    microseconds more on the host.

    Args:
        sequence: the step's; None if its batch was not sharded.
        step: the kind of step, in words ("training").
    """

    supports_higher_order_operators = True

    def __init__(self, sequence: ContextSequence | None, step: str) -> None:
        super().__init__()
        self.sequence = sequence
        self.step = step
        self.shared = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code would run uncompiled in this step, in more memory

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is CONTEXT_ATTENTION:
            self.shared += 1
        elif self.sequence is not None and torch._C._current_graph_task_id() == -1:
            # Not in a backward: shared attention's computes with each device's keys, outside its operator.
            self._look_at(self.sequence, func, args)
        return func(*args, **(kwargs or {}))

    def require_shared(self, degree: int) -> None:
        """Raise UserError if no attention was shared."""
        if self.shared == 0:
            raise UserError(
                f"a {self.step} step in which no attention is shared by the {degree} devices that hold parts of each "
                "sequence: every token would see only its own device's part. Use a model made of "
                "flashtrain.Attention, or another strategy (fsdp, ddp) for a model with its own attention, or if "
                "tokens need not see each other ContextParallelStrategy(check_attention=False)."
            )

    def _look_at(self, sequence: ContextSequence, func: Any, args: tuple) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator
            if "flex_attention" in str(func) and len(args) > 1 and isinstance(args[1], Tensor):
                sequence.refuse_own_part(args[1].shape[-2], "flex_attention")
            return
        if schema.name in SOFTMAX:
            shape = args[0].shape
            if len(shape) > 2 and args[1] in (-1, len(shape) - 1) and sequence.is_own_part(shape[-2]):
                sequence.refuse_own_part(shape[-1], "softmax")
            return
        for argument, given in zip(schema.arguments, args, strict=False):
            if argument.name in KEYS and isinstance(given, Tensor):
                place = -2 if schema.name.startswith(TORCH_ATTENTION) else KEYS[argument.name]
                if given.is_floating_point() and given.dim() >= -place:
                    sequence.refuse_own_part(given.shape[place], schema.name.partition("::")[2].strip("_"))
                return
