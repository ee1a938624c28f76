"""What each of four gloo ranks does for test_exact_attention.py: every case,
one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashtrain.distributed.context import all_gather, ulysses
from flashtrain.distributed.context.attention import SharedAttention
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.methods import METHODS
from flashtrain_kernels import documents_from_cu_seqlens, flash_attn_func, masks
from flashtrain_kernels.masks import Mask

LENGTH = 45  # odd: no degree and no block divides it
SEED = 11
SOFTCAP = 1.5
HEADS = {"MHA": 1, "GQA": 2, "MQA": None}  # query heads a key head
WIDE = (10, 2)  # query heads and key heads


def mask_of(name: str) -> Mask:
    """The masks by name; those of documents have two rows that differ."""
    documents = torch.tensor([[0] * 7 + [1] * 23 + [2] * 15, [0] * 1 + [1] * 2 + [2] * 42])
    segments = torch.arange(LENGTH).expand(2, -1) // 6
    made = {
        "full": lambda: masks.full(LENGTH),
        "causal": lambda: masks.causal(LENGTH),
        "full document": lambda: masks.document(documents, causal=False),
        "causal document": lambda: masks.document(documents, causal=True),
        "full window": lambda: masks.sliding_window(LENGTH, (5, 4)),
        "causal window": lambda: masks.sliding_window(LENGTH, (7, 0), documents=documents),
        "shared question": lambda: masks.shared_question(segments, documents=documents),
        "global window": lambda: masks.global_window(LENGTH, 3, (4, 4)),
        "causal blockwise": lambda: masks.causal_blockwise(segments),
        "prefix-LM": lambda: masks.prefix_lm(torch.tensor([9, 31]), seqlen=LENGTH),
        "prefix-LM document": lambda: masks.prefix_lm(
            torch.full((2, LENGTH), 4), documents=documents
        ),
        "block-causal document": lambda: masks.block_causal(4, documents),
        # Tokens past the ninth belong to no document: whole ranks see nothing.
        "blind ranks": lambda: masks.document(
            documents_from_cu_seqlens(torch.tensor([0, 9]), LENGTH), causal=True
        ),
    }
    return made[name]()


MASKS = (
    "full", "causal", "full document", "causal document", "full window", "causal window",
    "shared question",
    "global window", "causal blockwise", "prefix-LM", "prefix-LM document", "block-causal document",
    "blind ranks",
)  # fmt: skip


class Case(NamedTuple):
    """dropout: of the weights. whole: what is seen comes in one piece, and queries that see
    other ranks' keys are copied even if they are many. capped: scores are bounded, and a
    sink stands in every row."""

    method: str
    mask: str
    heads: str = "MHA"
    degree: int = 4
    layout: str = "balanced"
    dropout: float = 0.0
    whole: bool = False
    capped: bool = False

    def __str__(self) -> str:
        dropout = ", dropout" if self.dropout else ""
        whole = ", one piece" if self.whole else ""
        capped = ", softcap and sinks" if self.capped else ""
        return (
            f"{self.method}, {self.mask}, {self.heads}, {self.degree} ranks, "
            f"{self.layout}{dropout}{whole}{capped}"
        )


def cases() -> Iterator[Case]:
    """Every case there is."""
    for method, mask, heads in itertools.product(METHODS, MASKS, HEADS):
        yield Case(method, mask, heads)
    for method in METHODS:
        for mask in ("causal", "causal document", "shared question"):
            yield Case(method, mask, "GQA", dropout=0.3)
        yield Case(method, "blind ranks", layout="contiguous")
        # Little of what others hold is seen.
        for mask in ("causal window", "shared question", "full window"):
            yield Case(method, mask, "GQA", layout="contiguous")
        for mask in ("causal", "full"):  # few runs a rank: calls of bands, without a mask
            yield Case(method, mask, "GQA", layout="zigzag")
            yield Case(method, mask, layout="contiguous")
        for mask in ("causal", "causal window", "blind ranks"):
            yield Case(method, mask, "GQA", capped=True)
            yield Case(method, mask, "MQA", layout="contiguous", dropout=0.3, capped=True)
        if method != "hybrid":
            yield Case(method, "causal document", "GQA", degree=2)
            # Several heads a rank, which go in pieces.
            yield Case(method, "causal", degree=2, dropout=0.3)
            yield Case(method, "causal document", degree=2)
            yield Case(method, "causal", "MQA", degree=2)
    for mask in ("causal document", "causal window"):
        yield Case("all-gather", mask, "GQA", whole=True)
    # A rank has five query heads and one key head: pieces that share it.
    for mask in ("causal", "causal document"):
        yield Case("ulysses", mask, "wide", degree=2)
        yield Case("ulysses", mask, "wide", degree=2, whole=True)
        yield Case("ulysses", mask, "wide", degree=2, dropout=0.3, capped=True)


@cache
def one_process(
    mask: str, heads: int, kv_heads: int, dropout: float, capped: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(q, k, v, sinks and out's gradient, out and the gradients of q, k, v and sinks): what
    every method must give."""
    generator = torch.Generator().manual_seed(heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    whole = [random(2, LENGTH, count, 4) for count in (heads, kv_heads, kv_heads)]
    dout, sinks = random(2, LENGTH, heads, 4), random(heads)
    leaves = [x.clone().requires_grad_() for x in (*whole, sinks)]
    *qkv, sink = leaves
    torch.manual_seed(SEED)
    options = {
        "mask": mask_of(mask),
        "dropout_p": dropout,
        "dropout_seed": torch.randint(0, 2**63 - 1, (1,)),
    }
    if capped:
        out, lse = flash_attn_func(*qkv, **options, softcap=SOFTCAP, return_lse=True)
        # One more score a row, whose value is nothing.
        expected = out * torch.sigmoid(lse - sink[None, :, None]).transpose(1, 2)[..., None]
    else:
        expected = flash_attn_func(*qkv, **options)
    gradients = torch.autograd.grad(expected, leaves, dout, materialize_grads=True)
    return [*whole, sinks, dout], [expected.detach(), *gradients]


def errors(case: Case, group: ContextGroup) -> dict[str, float]:
    """How far this rank's output and gradients are from one process's."""
    mask = mask_of(case.mask)
    heads = 6 if case.method == "hybrid" else 4
    heads, kv_heads = (
        WIDE if case.heads == "wide" else (heads, heads // (HEADS[case.heads] or heads))
    )
    (*whole, sinks, dout), (*exact, to_sinks) = one_process(
        case.mask, heads, kv_heads, case.dropout, case.capped
    )
    layout = LAYOUTS[case.layout](mask, case.degree)
    all_gather.PIECE_BYTES = ulysses.PIECE_ROWS = 1 << 28 if case.whole else 1
    all_gather.MOST_OUTWARD = 1.0 if case.whole else 0.5
    mine = [layout.shard(x, group.rank).requires_grad_() for x in whole]
    sink = sinks.clone().requires_grad_()
    capped = {"softcap": SOFTCAP, "sinks": sink} if case.capped else {}
    shared = SharedAttention(
        mask,
        layout,
        group,
        *mine[:2],
        method=case.method,
        dropout=case.dropout > 0,
        softcap=case.capped,
    )
    torch.manual_seed(SEED + group.rank)  # the first rank's draw is everyone's
    out = shared(*mine, scale=0.5, dropout=case.dropout, **capped)
    # What padding's output is given as a gradient must reach nothing.
    given = layout.shard(dout, group.rank, fill=7.0)
    *gradients, own = torch.autograd.grad(out, [*mine, sink], given, materialize_grads=True)
    dist.all_reduce(own, group=group.group)
    found = {
        name: (one - layout.shard(other, group.rank)).abs().max().item()
        for name, one, other in zip(
            ("out", "dq", "dk", "dv"), (out, *gradients), exact, strict=True
        )
    }
    return {**found, "dsinks": (own - to_sinks).abs().max().item()}


def found() -> dict[str, object]:
    """What this one of four ranks found; the default process group is made already."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {4: ContextGroup(), 2: ContextGroup(pairs[dist.get_rank() // 2])}
    return {str(case): errors(case, groups[case.degree]) for case in cases()}
