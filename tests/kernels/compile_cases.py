"""Compile every kernel with the tiles of the table, for GPUs that need not be there, and print what each uses as JSON.

Run as a program, because a compile for a wrong target may abort its process:

    python compile_cases.py 80 90 100 [--features causal dropout ...] [--head-dims 64 128]
"""

import argparse
import itertools
import json
from dataclasses import replace

import torch

from flashtrain_kernels import dispatch
from flashtrain_kernels.block_sparse import BlockMask
from flashtrain_kernels.masks import Mask, Plan
from flashtrain_kernels.options import Options
from flashtrain_kernels.portable.aot import compile_launch
from flashtrain_kernels.portable.backward import backward_launches
from flashtrain_kernels.portable.dbias import dbias_launch
from flashtrain_kernels.portable.forward import forward_launch

B, S, H = 2, 1024, 4


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def intervals(count: int) -> Mask:
    return Mask(empty(3 + 2 * count, B, S, dtype=torch.int32), None, S)


def blocks() -> BlockMask:
    rows, places = empty(1, H, 8, 3, dtype=torch.int64), empty(100, dtype=torch.int32)
    return BlockMask(rows, places, rows, places, (128, 128), S, S, None, 0)


FEATURES = {
    "full": Options(0.125),
    "causal": Options(0.125, right=0),
    "window": Options(0.125, left=-256, right=0),
    "intervals": Options(0.125, mask=intervals(1)),
    "two intervals": Options(0.125, mask=intervals(2)),
    "permuted": Options(0.125, mask=intervals(2)._replace(keys=empty(B, S, dtype=torch.int32))),
    "blocks": Options(0.125, right=0, mask=blocks()),
    "softcap": Options(0.125, right=0, softcap=30.0),
    "alibi": Options(0.125, right=0, alibi_slopes=empty(H, dtype=torch.float32)),
    "alibi of sequences": Options(0.125, mask=intervals(1), alibi_slopes=empty(B, H, dtype=torch.float32)),
    "bias": Options(0.125, bias=empty(1, H, S, S, dtype=torch.bfloat16)),
    "dropout": Options(0.125, right=0, dropout_p=0.1, seed=empty(3, dtype=torch.int64)),
    "intervals, dropout": Options(0.125, mask=intervals(1), dropout_p=0.1, seed=empty(3, dtype=torch.int64)),
    "everything": Options(
        0.125,
        softcap=30.0,
        dropout_p=0.1,
        bias=empty(1, H, S, S, dtype=torch.bfloat16),
        alibi_slopes=empty(H, dtype=torch.float32),
        seed=empty(3, dtype=torch.int64),
        mask=intervals(2),
    ),
}


def launches(arch: str, head_dim: int, dtype: torch.dtype, options: Options, group: int):
    """The launches of one training step's attention, on tensors without data."""
    rich = bool(options.softcap or options.dropout_p or options.bias is not None or options.alibi_slopes is not None)
    mask = options.mask
    scattered = isinstance(mask, Mask) and (mask.keys is not None or mask.queries.shape[0] > 5)
    tiles = dispatch.table_row(arch, head_dim, dtype, dispatch.Kind(scattered, group > 1, rich))
    if isinstance(mask, Mask):
        planned_for = dispatch.table_row(arch, head_dim, dtype, dispatch.Kind(rich=rich))
        sizes = (*planned_for.forward[:2], *planned_for.dq[:2], *planned_for.dkdv[:2])
        table = empty(B, 8, 16, dtype=torch.int32)
        options = replace(options, mask=mask._replace(plan=Plan(table, table, table, sizes)))
        tiles = dispatch.resized(tiles, sizes)
    q, kv = empty(B, S, H, head_dim, dtype=dtype), empty(B, S, H // group, head_dim, dtype=dtype)
    lse = empty(B, H, S, dtype=torch.float32)
    rows = empty(2, B, H, S, dtype=torch.float32)
    dq, dkdv = backward_launches(q, None, q, kv, kv, q, lse, options, (q, kv, kv), rows, tiles.dkdv, tiles.dq)
    made = {"forward": forward_launch(q, kv, kv, q, lse, options, tiles.forward), "dkdv": dkdv, "dq": dq}
    if options.bias is not None:
        made["dbias"] = dbias_launch(q, q, kv, kv, options, rows, options.bias, tiles.dq)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capabilities", type=int, nargs="+")
    parser.add_argument("--features", nargs="+", default=list(FEATURES))
    parser.add_argument("--groups", type=int, nargs="+", default=[1])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    chosen = parser.parse_args()
    for capability, head_dim, group, feature in itertools.product(
        chosen.capabilities, chosen.head_dims, chosen.groups, chosen.features
    ):
        arch = dispatch.architecture(divmod(capability, 10))
        for name, launch in launches(arch, head_dim, torch.bfloat16, FEATURES[feature], group).items():
            compiled = compile_launch(launch, capability)
            row = {
                "capability": capability, "head_dim": head_dim, "group": group, "feature": feature, "kernel": name,
                "registers": compiled.registers, "shared": compiled.shared, "spills": compiled.spills,
                "wgmma": sum(n for op, n in compiled.instructions.items() if op.startswith("HGMMA")),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
