"""Compile every kernel with the tiles of the table, for GPUs that need not be there, and print what each uses as JSON.

Run as a program, because a compile for a wrong target may abort its process: python compile_cases.py 80 90 100
"""

import itertools
import json
import sys

import torch

from flashtrain_kernels import dispatch
from flashtrain_kernels.masks import Documents
from flashtrain_kernels.portable.aot import compile_launch
from flashtrain_kernels.portable.backward import backward_launches
from flashtrain_kernels.portable.forward import forward_launch


def launches(tiles: dispatch.Tiles, head_dim: int, dtype: torch.dtype, causal: bool, documents: bool, group: int = 1):
    """The launches of one training step's attention, on tensors without data."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, kv = empty(2, 1024, 4, head_dim), empty(2, 1024, 4 // group, head_dim)
    lse = empty(2, 4, 1024, dtype=torch.float32)
    boundaries = Documents(*[empty(2, 1024, dtype=torch.int32)] * 2) if documents else None
    forward = forward_launch(q, kv, kv, q, lse, boundaries, 0.125, causal, tiles.forward)
    rows = empty(2, 2, 4, 1024, dtype=torch.float32)
    dq, dkdv = backward_launches(
        q, None, q, kv, kv, q, lse, boundaries, 0.125, causal, q, kv, kv, rows, tiles.dkdv, tiles.dq
    )
    return {"forward": forward, "dkdv": dkdv, "dq": dq}


def main(capabilities: list[int]) -> None:
    for capability, head_dim in itertools.product(capabilities, (64, 128)):
        tiles = dispatch.table_row(dispatch.architecture(divmod(capability, 10)), head_dim, torch.bfloat16)
        for name, launch in launches(tiles, head_dim, torch.bfloat16, causal=True, documents=False).items():
            compiled = compile_launch(launch, capability)
            row = {
                "capability": capability, "head_dim": head_dim, "kernel": name, "registers": compiled.registers,
                "shared": compiled.shared, "spills": compiled.spills,
                "wgmma": sum(count for op, count in compiled.instructions.items() if op.startswith("HGMMA")),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
