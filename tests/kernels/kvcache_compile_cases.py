"""Compile the kernels of flash_attn_with_kvcache for GPUs that need not be there: python kvcache_compile_cases.py 80 90

B batch, Sq queries, H query heads, K key/value heads, D head dimension.
"""

import json
import sys
from collections.abc import Iterator

import torch
from ahead_of_time import compile_launch

from flashtrain_kernels.backends.portable.decode import append_launch, attend_launches
from flashtrain_kernels.backends.portable.launch import Launch


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Sq, H, K, D, page rows (0: none), R, left, right, softcap.
CASES = [
    (1, 32, 8, 128, 0, 0, -1, -1, 0.0),
    (1, 32, 8, 128, 16, 128, -1, 0, 0.0),
    (1, 16, 16, 64, 256, 32, 128, 0, 50.0),
    (300, 32, 8, 128, 16, 128, -1, 0, 0.0),
    (300, 8, 8, 256, 0, 64, -1, 0, 0.0),
]


def launches() -> Iterator[tuple[str, Launch]]:
    for seqlen_q, heads, kv_heads, head_dim, page, rotary, left, right, softcap in CASES:
        cache = empty(*((1000, page) if page else (4, 131_072)), kv_heads, head_dim)
        lengths, table = empty(4, dtype=torch.int32), empty(4, 64 if page else 1, dtype=torch.int32)
        q, new = empty(4, seqlen_q, heads, head_dim), empty(4, seqlen_q, kv_heads, head_dim)
        turn = (empty(131_072, rotary // 2), empty(131_072, rotary // 2), True) if rotary else (None, None, True)
        slopes = empty(heads, dtype=torch.float32) if softcap else None
        if rotary:
            yield "append", append_launch(new, new, cache, cache, lengths, table, bool(page), *turn)
        made = attend_launches(
            q, empty(4, heads, seqlen_q, dtype=torch.float32), q, cache, cache, lengths, None, table, bool(page),
            seqlen_q, *turn, 0.1, left, right, softcap, slopes, 8 if seqlen_q == 1 else 1,
        )  # fmt: skip
        yield from zip(("attend", "join"), made, strict=False)


for capability in map(int, sys.argv[1:]):
    for name, launch in launches():
        compiled = compile_launch(launch, capability)
        row = {
            "capability": capability,
            "kernel": name,
            "head_dim": launch.constants.get("HEAD_DIM") or launch.constants["C"].head_dim,
        }
        row |= {"registers": compiled.registers, "shared": compiled.shared, "spills": compiled.spills}
        print(json.dumps(row), flush=True)
