"""Compile the plan's kernels for a GPU that need not be there, and print what each uses as JSON.

Run as a program, because a compile for a wrong target may abort its process: python plan_compile_cases.py 90
"""

import json
import sys

import torch
from ahead_of_time import compile_launch

from flashtrain_kernels.backends.portable.plan import plan_launches
from flashtrain_kernels.masks.plan import empty_tables

BLOCKS = (128, 64, 64, 64, 32, 128)

for capability in map(int, sys.argv[1:]):
    for rows, with_keys in ((5, False), (7, False), (7, True)):
        queries = torch.empty(rows, 2, 1000, dtype=torch.int32, device="meta")
        keys = torch.empty(2, 1000, dtype=torch.int32, device="meta") if with_keys else None
        for launch in plan_launches(queries, keys, 1000, BLOCKS, empty_tables(queries, 1000, list(BLOCKS))):
            compiled = compile_launch(launch, capability)
            print(json.dumps({"capability": capability, "spills": compiled.spills, "shared": compiled.shared}))
