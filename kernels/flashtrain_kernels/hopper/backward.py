"""The backward pass on Hopper GPUs: three launches, of which the middle one does the work (backward_kernel.py).

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..block_sparse import BlockMask
from ..masks import Mask
from ..options import Options
from ..portable.features import features_of
from ..portable.launch import Launch, ceil_div, mask_arguments, table_arguments
from .backward_kernel import Choices, backward_kernel
from .backward_rows import finish_kernel, prepare_kernel
from .backward_walk import BAND, BLOCK_K, BLOCK_Q, BLOCKS, PLAN
from .descriptors import descriptor, why_not, workspace
from .launch import multiprocessors, run

QUERIES, KEYS = BLOCK_Q.value, BLOCK_K.value
# From how many queries on dQ is computed a tile late at D = 128, as measured (kernels/OPTIMISATION.md): an item must
# have many tiles, as its first and last ones get longer.
LATE_QUERIES = 4096


def serves_backward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """None, or why this kernel does not serve the call."""
    mask = options.mask
    if q.shape[3] not in (64, 128):
        return f"head dimension {q.shape[3]}"
    if options.rich:
        return "softcap, ALiBi, bias or dropout"
    if isinstance(mask, Mask) and mask.plan is not None and mask.plan.blocks[4:6] != (QUERIES, KEYS):
        return "a mask planned for other tiles"
    if isinstance(mask, BlockMask) and (mask.block_size[0] < QUERIES or mask.block_size[1] < KEYS):
        return f"blocks below {QUERIES} queries and {KEYS} keys"
    for name, x in (("q", q), ("k", k), ("v", v)):
        reason = why_not(name, x)
        if reason is not None:
            return reason
    return None


def choices(q: Tensor, k: Tensor, options: Options, dk: Tensor, dv: Tensor) -> Choices:
    """What the kernel is compiled for."""
    mask = options.mask
    kind, tiles, intervals, key_positions = BAND.value, 1, 0, False
    if isinstance(mask, Mask):
        kind, intervals, key_positions = PLAN.value, 1 if mask.queries.shape[0] == 5 else 2, mask.keys is not None
    elif isinstance(mask, BlockMask):
        kind, tiles = BLOCKS.value, mask.block_size[0] // QUERIES
    return Choices(
        stages=3,
        group=q.shape[2] // k.shape[2],
        left=options.left is not None,
        right=options.right is not None,
        kind=kind,
        tiles=tiles,
        intervals=intervals,
        key_positions=key_positions,
        block_rows=mask.block_size[1] if isinstance(mask, BlockMask) else KEYS,
        aligned=all(step % 8 == 0 for x in (dk, dv) for step in x.stride()[:3]),
        late=q.shape[3] == 128 and kind == BAND.value and options.left is None and q.shape[1] >= LATE_QUERIES,
    )


def tiles_of_queries(seqlen_q: int, options: Options) -> int:
    """How many tiles of queries a head's workspaces have: whole blocks of a block-sparse mask."""
    block = max(QUERIES, options.mask.block_size[0]) if isinstance(options.mask, BlockMask) else QUERIES
    return ceil_div(seqlen_q, block) * (block // QUERIES)


def _heads_together(key_tiles: int, head_dim: int, options: Options) -> int:
    """How many heads' items are sorted by their tiles of keys: below a causal mask the first tiles have most to do, and
    the last ones to start should be short. No more heads than that needs: they share the second-level cache.

    A program gets every 132nd item: the group should not repeat in step with that.
    """
    if options.right is None or options.left is not None or (head_dim == 128 and key_tiles <= 8):
        return 1
    least = ceil_div(264, key_tiles)
    return min(range(least, least + 8), key=lambda heads: (math.gcd(132, heads * key_tiles), heads))


def backward_launches(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    gradients: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    work: Tensor,
    flags: Tensor,
) -> tuple[Launch, Launch, Launch]:
    """The launches, in order. rows, work: float32 workspaces of 128 and of 64 D numbers for each tile of queries.

    flags: int32, one for each 64 keys of a key/value head: is there a NaN in their gradients?
    """
    dq, dk, dv = gradients
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    query_tiles, key_tiles = tiles_of_queries(seqlen_q, options), ceil_div(seqlen_k, KEYS)
    places = batch * heads * query_tiles
    scale_log2 = options.scale * math.log2(math.e)
    items = key_tiles * batch * kv_heads
    prepare = Launch(
        kernel=prepare_kernel,
        grid=(places,),
        args=(
            out, dout, lse, lse if dlse is None else dlse, rows, work, *out.stride()[:3], *dout.stride()[:3], heads,
            seqlen_q, query_tiles,
        ),
        constants={"HAS_DLSE": dlse is not None, "D": head_dim},
        options={"num_warps": 4},
    )  # fmt: skip
    target: Any = workspace(work, (128, 32)) if head_dim == 128 else work
    mask = options.mask
    box_q, box_k = (1, QUERIES, 1, head_dim), (1, KEYS, 1, head_dim)
    fused = Launch(
        kernel=backward_kernel,
        grid=(min(multiprocessors(q.device), items) if head_dim == 64 else items,),
        args=(
            descriptor(q, box_q), descriptor(k, box_k), descriptor(v, box_k), descriptor(dout, box_q),
            workspace(rows, (2 * QUERIES,)), target,
            dk, dv, flags, *dk.stride()[:3], *dv.stride()[:3], scale_log2, heads,
            seqlen_q, seqlen_k, options.left or 0, options.right or 0, query_tiles, key_tiles, batch * kv_heads,
            _heads_together(key_tiles, head_dim, options), *mask_arguments(mask, lse),
            *table_arguments(mask, lse, "dkdv"),
        ),
        constants={
            "D": head_dim,
            "C": choices(q, k, options, dk, dv),
        },
        options={"num_warps": 4},
    )  # fmt: skip
    masked = mask is not None or options.left is not None or options.right is not None
    finish = Launch(
        kernel=finish_kernel,
        grid=(places + flags.numel() if masked else places,),
        args=(
            work, rows, flags, q, k, v, dout, dq, dk, dv, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *dout.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], options.scale, scale_log2,
            places, heads, seqlen_q, seqlen_k, options.left or 0, options.right or 0, query_tiles, key_tiles,
            *mask_arguments(mask, lse), *table_arguments(mask, lse, "dq"), *table_arguments(mask, lse, "dkdv"),
        ),
        constants={"CAREFUL": masked, "GROUP": heads // kv_heads, "F": features_of(options), "D": head_dim},
        options={"num_warps": 4},
    )  # fmt: skip
    return prepare, fused, finish


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill the gradients dq, dk, dv (any strides whose last is 1). Call it only where `serves_backward` says None."""
    if 0 in q.shape or 0 in k.shape:
        for gradient in gradients:
            gradient.zero_()
        return
    if why_not("dout", dout) is not None:
        dout = dout.contiguous()
    places = q.shape[0] * q.shape[2] * tiles_of_queries(q.shape[1], options)
    rows = torch.empty(places * 2 * QUERIES, dtype=torch.float32, device=q.device)
    work = torch.empty(places * QUERIES * q.shape[3], dtype=torch.float32, device=q.device)
    halves = q.shape[0] * k.shape[2] * ceil_div(k.shape[1], KEYS) * 2
    flags = torch.empty(halves, dtype=torch.int32, device=q.device)
    prepare, fused, finish = backward_launches(
        dout, dlse, q, k, v, out, lse, options, gradients, rows, work, flags
    )  # fmt: skip
    prepare.run()
    run(fused)
    finish.run()
