"""Compile the kernels that fill masks for a GPU that need not be there, and print what each uses as JSON.

Run as a program, because a compile for a wrong target may abort its process: python mask_compile_cases.py 90
"""

import json
import sys

import torch
from ahead_of_time import compile_launch

from flashtrain_kernels.backends.portable.mask_rows import (
    bounds_of_cu_seqlens_launch,
    bounds_of_ids_launches,
    document_rows_launches,
    packed_rows_launch,
)
from flashtrain_kernels.masks.operators import TWO_INTERVALS

KINDS = ("window", "prefix", "blocks", "shared question", "blockwise", "global", "causal global")


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


row, ids, bounds = empty(2, 5000), empty(2, 5000, dtype=torch.int64), empty(9)
launches = [
    *bounds_of_ids_launches(ids, row, row),
    bounds_of_cu_seqlens_launch(bounds, empty(1, 5000), empty(1, 5000)),
    packed_rows_launch(empty(5, 1, 5000), bounds, bounds, 5000, -1, 0),
]
for kind in KINDS:
    out = empty(7 if kind in TWO_INTERVALS else 5, 2, 5000)
    launches += document_rows_launches(out, kind, row, row, row, row, ids, 9, 9, 9)
for capability in map(int, sys.argv[1:]):
    for launch in launches:
        compiled = compile_launch(launch, capability)
        print(json.dumps({"capability": capability, "spills": compiled.spills, "shared": compiled.shared}))
