"""Compile the Gluon forward for sm_90, for GPUs that need not be there, and print what each kernel uses as JSON.

Run as a program: python hopper_forward_cases.py [--strict] [names of features]

B batch, S sequence, H query heads, K key/value heads (H / group), D head dimension.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from ahead_of_time import compile_gluon_launch, serialised

from flashtrain_kernels.backends.hopper import backward, forward_tiles
from flashtrain_kernels.backends.hopper.forward import forward_launch
from flashtrain_kernels.environment import release
from flashtrain_kernels.masks import Mask, Plan, Sequences
from flashtrain_kernels.masks.block_sparse import BlockMask
from flashtrain_kernels.options import Options

B, H = 2, 4


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def intervals(count: int, length: int, permuted: bool = False) -> Mask:
    table = empty(B, 8, 16, dtype=torch.int32)
    plan = Plan(table, table, table, (*forward_tiles.PLANNED, *forward_tiles.PLANNED, *backward.PLANNED))
    keys = empty(B, length, dtype=torch.int32) if permuted else None
    return Mask(empty(3 + 2 * count, B, length, dtype=torch.int32), keys, length, plan)


def blocks(length: int) -> BlockMask:
    rows, places = empty(1, H, 8, 3, dtype=torch.int64), empty(100, dtype=torch.int32)
    return BlockMask(rows, places, rows, places, (128, 128), length, length, None, 0)


def options(feature: str, length: int) -> Options:
    if feature.startswith("softcap"):
        return replace(options(feature.removeprefix("softcap ").replace("softcap", "causal"), length), softcap=30.0)
    if feature.startswith("dropout "):
        seed = empty(3, dtype=torch.int64)
        return replace(options(feature.removeprefix("dropout "), length), dropout_p=0.1, seed=seed)
    if feature.startswith("alibi "):
        slopes = empty(H, dtype=torch.float32)
        return replace(options(feature.removeprefix("alibi "), length), alibi_slopes=slopes)
    plain = {"full": (None, None), "causal": (None, 0), "window": (-256, 0)}
    if feature in plain:
        left, right = plain[feature]
        return Options(0.125, left=left, right=right)
    if feature.startswith("packed"):
        ends = empty(9, dtype=torch.int32)
        window = {"packed": (-1, 0), "packed full": (-1, -1), "packed window": (256, 0)}[feature]
        return Options(0.125).by_boundaries(Sequences(ends, ends, length, length, window))
    if feature == "blocks":
        return Options(0.125, right=0, mask=blocks(length))
    count = 2 if feature in ("two intervals", "permuted") else 1
    return Options(0.125, mask=intervals(count, length, permuted=feature == "permuted"))


# Feature, D, S, group: every tile of forward_tiles.py at least once.
CASES = [
    ("full", 64, 512, 1), ("full", 64, 4096, 1), ("causal", 64, 512, 1), ("causal", 64, 4096, 1),
    ("causal", 64, 32768, 1), ("window", 64, 4096, 1), ("intervals", 64, 4096, 2), ("two intervals", 64, 4096, 1),
    ("blocks", 64, 4096, 1), ("full", 128, 512, 1), ("full", 128, 4096, 1), ("causal", 128, 512, 4),
    ("causal", 128, 4096, 4), ("causal", 128, 32768, 1), ("window", 128, 4096, 1), ("intervals", 128, 4096, 1),
    ("two intervals", 128, 4096, 1), ("permuted", 128, 4096, 1), ("blocks", 128, 4096, 1), ("causal", 72, 512, 1),
    ("full", 256, 4096, 1), ("causal", 256, 4096, 1), ("window", 256, 4096, 1), ("packed", 64, 2048, 1),
    ("packed", 64, 32768, 4), ("packed", 128, 2048, 4), ("packed", 128, 32768, 1), ("packed full", 64, 32768, 1),
    ("packed full", 128, 32768, 1), ("packed window", 64, 32768, 1), ("packed window", 128, 32768, 4),
    ("softcap", 64, 512, 1), ("softcap", 64, 4096, 1), ("softcap", 128, 4096, 4), ("softcap", 128, 32768, 1),
    ("softcap", 256, 4096, 1),
    ("softcap full", 128, 4096, 1), ("softcap intervals", 128, 4096, 1), ("softcap packed", 128, 32768, 1),
    ("dropout causal", 64, 512, 1), ("dropout causal", 128, 4096, 4), ("dropout causal", 128, 32768, 1),
    ("dropout packed full", 64, 32768, 1), ("dropout packed", 128, 2048, 4), ("alibi causal", 64, 512, 1),
    ("alibi causal", 128, 4096, 4), ("alibi packed full", 64, 32768, 1), ("alibi packed", 128, 32768, 1),
]  # fmt: skip
SHARED_MEMORY = 232_448  # bytes that one block may use
# Spilling instructions that are let pass: outside the loop over keys, in setting up a tile and in the pass after a NaN.
SPILLS = {
    ("causal", 72): 8, ("causal", 256): 60, ("window", 256): 105, ("packed", 64): 13, ("packed", 128): 20,
    ("packed full", 64): 9,
    ("packed window", 64): 9, ("softcap", 64): 44, ("softcap", 256): 66, ("softcap packed", 128): 31,
    ("dropout causal", 128): 71, ("alibi causal", 64): 17, ("alibi packed full", 64): 16,
    ("alibi packed", 128): 31,
}  # fmt: skip
# And those of releases that keep more of the arguments in memory meanwhile.
SPILLS |= {
    (3, 8): {
        ("causal", 64): 3, ("blocks", 64): 8, ("causal", 128): 11, ("window", 128): 11, ("blocks", 128): 16,
        ("causal", 256): 94, ("packed", 128): 13, ("packed full", 128): 77, ("packed window", 128): 13,
    },
    (3, 9): {
        ("causal", 256): 67, ("window", 256): 110, ("packed full", 64): 63, ("packed full", 128): 95,
        ("packed window", 128): 38,
    },
}.get(release(), {})  # fmt: skip
# Of them in the loop over keys.
IN_LOOPS = {("causal", 256): 1, ("window", 256): 1} if release() >= (3, 8) else {}


def rows(features: list[str]) -> Iterator[dict[str, Any]]:
    """What each kernel of the cases of these features uses."""
    for feature, head_dim, length, group in CASES:
        if feature not in features:
            continue
        given = options(feature, length)
        q = empty(B, length, H, head_dim, dtype=torch.bfloat16)
        kv = empty(B, length, H // group, head_dim, dtype=torch.bfloat16)
        tile = forward_tiles.forward_tile(q, kv, given)
        launch = forward_launch(q, kv, kv, q, empty(B, H, length, dtype=torch.float32), replace(given), tile)
        compiled, said = compile_gluon_launch(launch)
        row = {
            "feature": feature, "head_dim": head_dim, "length": length, "group": group, "tile": list(tile),
            "registers": compiled.registers, "shared": compiled.shared, "spills": compiled.spills,
            "in_loops": compiled.in_loops, "wgmma": compiled.wgmma, "tma": compiled.tma,
            "serialised": serialised(said),
        }  # fmt: skip
        yield row


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, which is nothing, it is hoped."""
    found = []
    if row["spills"] > SPILLS.get((row["feature"], row["head_dim"]), 0):
        found.append("registers spilled")
    if row["in_loops"] > IN_LOOPS.get((row["feature"], row["head_dim"]), 0):
        found.append("registers spilled in the loop")
    if row["shared"] > SHARED_MEMORY:
        found.append("too much shared memory")
    if not row["wgmma"] or not row["tma"]:
        found.append("no wgmma or no TMA")
    if row["serialised"]:
        found.append("wgmma serialised")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("features", nargs="*", default=list(dict.fromkeys(case[0] for case in CASES)))
    parser.add_argument("--strict", action="store_true", help="fail where a row has faults")
    chosen = parser.parse_args()
    wrong = 0
    for row in rows(chosen.features):
        row["faults"] = faults(row)
        print(json.dumps(row), flush=True)
        wrong += bool(row["faults"])
    if chosen.strict and wrong:
        sys.exit(f"{wrong} kernels have faults under triton {triton.__version__}")


if __name__ == "__main__":
    main()
