"""Compile the small kernels (plans, masks, the loss head, merging, a cache of keys, AdamW) for GPUs
that need not be there, and print what each uses as JSON.

Run as a program, because a compile for a wrong target may abort its process: python
small_compile_cases.py 80 90
"""

import json
import sys
from collections.abc import Iterator

import torch
from ahead_of_time import compile_launch, empty

from flashtrain_kernels.backends.portable.adamw import Update, adamw_launch
from flashtrain_kernels.backends.portable.append import append_launch
from flashtrain_kernels.backends.portable.cross_entropy import softmax_rows_launch
from flashtrain_kernels.backends.portable.decode import attend_launches
from flashtrain_kernels.backends.portable.launch import Launch
from flashtrain_kernels.backends.portable.mask_rows import (
    bounds_of_cu_seqlens_launch,
    bounds_of_ids_launches,
    document_rows_launches,
    packed_rows_launch,
)
from flashtrain_kernels.backends.portable.merge import merge_launch
from flashtrain_kernels.backends.portable.plan import plan_launches
from flashtrain_kernels.masks.operators import TWO_INTERVALS
from flashtrain_kernels.masks.plan import empty_tables

INT, FLOAT, HALF = torch.int32, torch.float32, torch.bfloat16


def plans() -> Iterator[Launch]:
    blocks = [128, 64, 64, 64, 32, 128]
    for rows, with_keys in ((5, False), (7, False), (7, True)):
        queries, keys = (
            empty(rows, 2, 1000, dtype=INT),
            empty(2, 1000, dtype=INT) if with_keys else None,
        )
        yield from plan_launches(
            queries, keys, 1000, tuple(blocks), empty_tables(queries, 1000, blocks)
        )


def masks() -> Iterator[Launch]:
    row, ids, bounds = (
        empty(2, 5000, dtype=INT),
        empty(2, 5000, dtype=torch.int64),
        empty(9, dtype=INT),
    )
    yield from bounds_of_ids_launches(ids, row, row)
    yield bounds_of_cu_seqlens_launch(bounds, empty(1, 5000, dtype=INT), empty(1, 5000, dtype=INT))
    yield packed_rows_launch(empty(5, 1, 5000, dtype=INT), bounds, bounds, 5000, -1, 0)
    for kind in (
        "window",
        "prefix",
        "blocks",
        "shared question",
        "blockwise",
        "global",
        "causal global",
    ):
        out = empty(7 if kind in TWO_INTERVALS else 5, 2, 5000, dtype=INT)
        yield from document_rows_launches(out, kind, row, row, row, row, ids, 9, 9, 9)


def losses() -> Iterator[Launch]:
    labels, losses = empty(100, dtype=torch.int64), empty(100, dtype=FLOAT)
    for dtype in (HALF, FLOAT):
        for upstream in (None, losses):
            yield softmax_rows_launch(
                empty(100, 50304, dtype=dtype), labels, losses, 50257, -100, upstream
            )


def merging() -> Iterator[Launch]:
    lse = empty(2, 8, 1000, dtype=FLOAT)
    for head_dim in (64, 96, 128, 256):
        part = empty(2, 500, 8, head_dim, dtype=HALF)
        out = empty(2, 1000, 8, head_dim, dtype=FLOAT)[:, 500:]
        yield merge_launch(out, lse[:, :, 500:], part, empty(2, 8, 500, dtype=FLOAT))


# Sq queries, H query heads, K key/value heads, D head dimension, page rows (0: none), R,
# left, right, softcap.
CACHES = [
    (1, 32, 8, 128, 0, 0, -1, -1, 0.0),
    (1, 32, 8, 128, 16, 128, -1, 0, 0.0),
    (1, 16, 16, 64, 256, 32, 128, 0, 50.0),
    (300, 32, 8, 128, 16, 128, -1, 0, 0.0),
    (300, 8, 8, 256, 0, 64, -1, 0, 0.0),
    (1, 16, 2, 512, 16, 128, -1, 0, 0.0),
]


def caches() -> Iterator[Launch]:
    for seqlen_q, heads, kv_heads, head_dim, page, rotary, left, right, softcap in CACHES:
        cache = empty(*((1000, page) if page else (4, 131_072)), kv_heads, head_dim, dtype=HALF)
        lengths, table = empty(4, dtype=INT), empty(4, 64 if page else 1, dtype=INT)
        q, new = (empty(4, seqlen_q, count, head_dim, dtype=HALF) for count in (heads, kv_heads))
        angles = empty(131_072, rotary // 2, dtype=HALF) if rotary else None
        if rotary:
            yield append_launch(
                new, new, cache, cache, lengths, table, bool(page), angles, angles, True
            )
        yield from attend_launches(
            q, empty(4, heads, seqlen_q, dtype=FLOAT), q, cache, cache, lengths, None, table,
            bool(page), seqlen_q,
            angles, angles, True, 0.1, left, right, softcap,
            empty(heads, dtype=FLOAT) if softcap else None,
            8 if seqlen_q == 1 else 1,
        )  # fmt: skip


def updates() -> Iterator[Launch]:
    factor, step = empty(dtype=FLOAT), empty(dtype=FLOAT)
    # The last: a size of which loads cannot be 16 bytes wide.
    for gradient, weight, scale, size in (
        (HALF, HALF, factor, 4096), (HALF, HALF, None, 4096), (FLOAT, None, factor, 4096),
        (HALF, HALF, factor, 4097),
    ):  # fmt: skip
        weights = None if weight is None else empty(size, dtype=weight)
        others = [empty(size, dtype=FLOAT) for _ in range(3)]
        update = Update(empty(size, dtype=gradient), weights, *others, step)
        yield adamw_launch([update] * 300, scale, 1e-3, 0.9, 0.95, 1e-8, 0.1)


KERNELS = {
    "plans": plans, "masks": masks, "losses": losses, "merging": merging, "caches": caches,
    "updates": updates,
}  # fmt: skip

if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for name, launches in KERNELS.items():
            for launch in launches():
                compiled = compile_launch(launch, capability)
                row = {"capability": capability, "kernel": name}
                row |= {
                    "registers": compiled.registers,
                    "shared": compiled.shared,
                    "spills": compiled.spills,
                }
                print(json.dumps(row), flush=True)
