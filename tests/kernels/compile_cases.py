"""Compile every kernel with the tiles of the table, for GPUs that need not be there, and print
what each uses as JSON.

Run as a program, because a compile for a wrong target may abort its process:

    python compile_cases.py 80 90 100 [--cases releases] [--half 0] [--strict]

B batch, S sequence, H query heads, K key/value heads (H / group), D head dimension.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from ahead_of_time import compile_launch, empty, report

from flashtrain_kernels.backends import Call, Gradients
from flashtrain_kernels.backends.portable import tile_table
from flashtrain_kernels.backends.portable.backward import backward_launches
from flashtrain_kernels.backends.portable.dbias import dbias_launch
from flashtrain_kernels.backends.portable.forward import forward_launch
from flashtrain_kernels.masks import Mask, Plan
from flashtrain_kernels.masks.block_sparse import BlockMask
from flashtrain_kernels.options import Options

B, S, H = 2, 1024, 4


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
    "alibi of sequences": Options(0.125, mask=intervals(1),
        alibi_slopes=empty(B, H, dtype=torch.float32)),
    "bias": Options(0.125, bias=empty(1, H, S, S, dtype=torch.bfloat16)),
    "bias of blocks": Options(0.125, right=0, bias=empty(1, H, S, S, dtype=torch.bfloat16),
        mask=blocks()),
    "dropout": Options(0.125, right=0, dropout_p=0.1, seed=empty(3, dtype=torch.int64)),
    "intervals, dropout": Options(0.125, mask=intervals(1), dropout_p=0.1,
        seed=empty(3, dtype=torch.int64)),
    "everything": Options(
        0.125, softcap=30.0, dropout_p=0.1, bias=empty(1, H, S, S, dtype=torch.bfloat16),
        alibi_slopes=empty(H, dtype=torch.float32), seed=empty(3, dtype=torch.int64),
        mask=intervals(2),
    ),
}  # fmt: skip


Case = tuple[str, int, int]  # feature, D, group
CASES: dict[str, list[Case]] = {
    # Every feature once or twice: what the tests compile for sm_90, and .ci/run for the others.
    "tests": [
        ("full", 64, 1), ("causal", 64, 1), ("intervals", 64, 1), ("permuted", 64, 1),
        ("dropout", 64, 1),
        ("everything", 64, 1), ("causal", 128, 2), ("window", 128, 1), ("two intervals", 128, 1),
        ("blocks", 128, 2),
        ("softcap", 128, 1), ("alibi", 128, 1), ("alibi of sequences", 128, 1), ("bias", 128, 1),
        ("intervals, dropout", 128, 1), ("bias of blocks", 64, 1), ("causal", 512, 2),
        ("intervals", 512, 1),
    ],
    # Dense, masks and rich, for each release of Triton.
    "releases": [
        ("full", 64, 1), ("causal", 64, 2), ("intervals", 64, 1), ("two intervals", 64, 1),
        ("bias", 64, 1),
        ("full", 128, 1), ("causal", 128, 2), ("intervals", 128, 2), ("two intervals", 128, 1),
        ("blocks", 128, 2),
        ("bias", 128, 1), ("intervals, dropout", 128, 1), ("causal", 512, 1),
    ],
    # Small shared memory, and head dimensions that only fit with spilled registers.
    "small": [*itertools.product(("full", "causal", "dropout"), (64, 128, 256), (1,)),
        ("bias", 128, 1)],
}  # fmt: skip
CASES["tests and releases"] = list(dict.fromkeys([*CASES["tests"], *CASES["releases"]]))
# Shared memory that one block may use, in bytes.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def launches(arch: str, head_dim: int, dtype: torch.dtype, options: Options, group: int):
    """The launches of one training step's attention, on tensors without data."""
    q, kv = empty(B, S, H, head_dim, dtype=dtype), empty(B, S, H // group, head_dim, dtype=dtype)
    kind = tile_table.kind_of(Call(q, kv, kv, options))
    tiles = tile_table.table_row(arch, head_dim, dtype, kind)
    mask = options.mask
    if isinstance(mask, Mask):
        planned_for = tile_table.table_row(
            arch, head_dim, dtype, tile_table.Kind(intervals=True, rich=kind.rich)
        )
        sizes = (*planned_for.forward[:2], *planned_for.dq[:2], *planned_for.dkdv[:2])
        table = empty(B, 8, 16, dtype=torch.int32)
        options = replace(options, mask=mask._replace(plan=Plan(table, table, table, sizes)))
        tiles = tile_table.resized(tiles, sizes)
    lse = empty(B, H, S, dtype=torch.float32)
    rows = empty(2, B, H, S, dtype=torch.float32)
    call, gradients = Call(q, kv, kv, options), Gradients(q, None, q, lse, q, kv, kv, None)
    names = (
        ("rows", "both") if tiles.together else ("dq", "dk", "dv") if tiles.dv else ("dq", "dkdv")
    )
    backward = dict(zip(names, backward_launches(call, gradients, rows, tiles), strict=True))
    made = {"forward": forward_launch(call, q, lse, tiles.forward), **backward}
    if options.bias is not None:
        made["dbias"] = dbias_launch(call, q, rows, options.bias, tiles.dbias)
    return made


def compiled_rows(capability: int, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """What each kernel of the cases uses."""
    arch = tile_table.architecture(divmod(capability, 10))
    for feature, head_dim, group in cases:
        for name, launch in launches(
            arch, head_dim, torch.bfloat16, FEATURES[feature], group
        ).items():
            compiled = compile_launch(launch, capability)
            yield {
                "capability": capability, "head_dim": head_dim, "group": group, "feature": feature,
                "kernel": name,
                "registers": compiled.registers, "shared": compiled.shared,
                "spills": compiled.spills,
                "wgmma": compiled.wgmma,
            }  # fmt: skip


# Every feature at once has no tile of its own: it spills, within reason.
EVERYTHING_SPILLS = 1500
# sm_90, D = 128, several query heads a key head: the backward in one launch puts up to four
# registers aside before its loops and takes them back after, which costs nothing; every tile
# without that was 16% slower (16 queries a step).
GROUPED_SPILLS = 8


def faults(row: dict[str, Any], spills: int = 0) -> list[str]:
    """What is wrong with a row, which is nothing, it is hoped.

    Spills count where the table promises that there are none: not with every feature at once, not
    above D = 128, and not on GPUs with little shared memory. spills: how many instructions are let
    pass (see GROUPED_SPILLS too).
    """
    capability, found = row["capability"], []
    large = SHARED_MEMORY[capability] > 128 * 1024
    promised = large and row["head_dim"] <= 128 and row["feature"] != "everything"
    if capability == 90 and row["head_dim"] == 128 and row["group"] > 1 and row["kernel"] == "both":
        spills = max(spills, GROUPED_SPILLS)
    if row["spills"] > (spills if promised else EVERYTHING_SPILLS):
        found.append("registers spilled")
    if row["shared"] > SHARED_MEMORY[capability]:
        found.append("too much shared memory")
    if capability == 90 and row["wgmma"] == 0 and row["kernel"] != "rows":
        found.append("no wgmma")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capabilities", type=int, nargs="+", choices=sorted(SHARED_MEMORY))
    parser.add_argument("--cases", default="tests", choices=sorted(CASES))
    parser.add_argument(
        "--half", type=int, choices=(0, 1), help="every other case, from this one on"
    )
    parser.add_argument("--strict", action="store_true", help="fail where a row has faults")
    parser.add_argument(
        "--spills", type=int, default=0, help="spill instructions a kernel that are no fault"
    )
    chosen = parser.parse_args()
    cases = CASES[chosen.cases] if chosen.half is None else CASES[chosen.cases][chosen.half :: 2]
    rows = (row for capability in chosen.capabilities for row in compiled_rows(capability, cases))
    report((row | {"faults": faults(row, chosen.spills)} for row in rows), chosen.strict)


if __name__ == "__main__":
    main()
