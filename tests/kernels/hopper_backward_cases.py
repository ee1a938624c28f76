"""Compile the Hopper backward ahead of time, for sm_90 with no GPU, and print what each variant uses as JSON.

    python hopper_backward_cases.py [--strict] [names of features]

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

from flashtrain_kernels.backends.hopper.backward import KEYS, LATE_QUERIES, QUERIES, backward_launches
from flashtrain_kernels.environment import release
from flashtrain_kernels.masks import Mask, Plan, Sequences
from flashtrain_kernels.masks.block_sparse import BlockMask
from flashtrain_kernels.options import Options

B, S, H = 2, 1024, 4
SHORT, MANY = LATE_QUERIES // 2, 132  # batch rows that give every program a whole head


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def intervals(count: int, permuted: bool = False) -> Mask:
    table = empty(B, S // KEYS, 16, dtype=torch.int32)
    keys = empty(B, S, dtype=torch.int32) if permuted else None
    plan = Plan(table, table, table, (128, 64, 64, 64, QUERIES, KEYS))
    return Mask(empty(3 + 2 * count, B, S, dtype=torch.int32), keys, S, plan)


def blocks() -> BlockMask:
    rows, places = empty(1, H, 8, 3, dtype=torch.int64), empty(100, dtype=torch.int32)
    return BlockMask(rows, places, rows, places, (128, 128), S, S, None, 0)


def packed(*window: int) -> Options:
    ends = empty(2, dtype=torch.int32)
    return Options(0.125).by_boundaries(Sequences(ends, ends, S, S, window))


FEATURES = {
    "full": Options(0.125),
    "causal": Options(0.125, right=0),
    "window": Options(0.125, left=-256, right=0),
    "intervals": Options(0.125, mask=intervals(1)),
    "two intervals": Options(0.125, mask=intervals(2)),
    "permuted": Options(0.125, mask=intervals(2, permuted=True)),
    "blocks": Options(0.125, right=0, mask=blocks()),
    "packed": packed(-1, 0),
    "packed full": packed(-1, -1),
    "packed window": packed(256, 0),
    "softcap": Options(0.125, right=0, softcap=30.0),
    "softcap two intervals": Options(0.125, softcap=30.0, mask=intervals(2)),
    "softcap packed": replace(packed(-1, 0), softcap=30.0),
    "deterministic": Options(0.125, right=0, deterministic=True),
    "deterministic window": Options(0.125, left=-256, right=0, deterministic=True),
    "deterministic packed": replace(packed(-1, 0), deterministic=True),
    "padded": Options(0.125, right=0),  # head dimensions that are computed as 128 or 256
}
FEATURES |= {
    f"dropout {name}": replace(FEATURES[name], dropout_p=0.1, seed=empty(3, dtype=torch.int64))
    for name in ("causal", "window", "packed full")
}
FEATURES |= {
    f"alibi {name}": replace(FEATURES[name], alibi_slopes=empty(H, dtype=torch.float32))
    for name in ("causal", "packed full")
}
GROUPS = {
    "dropout causal": (4,),
    "alibi causal": (4,),
    "full": (1, 4),
    "causal": (1, 4),
    "deterministic": (1, 4),
    "blocks": (1, 2),
    "intervals": (1, 2),
    "packed": (1, 4),
}


def variants(feature: str) -> Iterator[tuple[int, int, int, int]]:
    """Head dimension, group, length and batch of a feature's kernels. There are others at D = 64 for short calls whose
    heads are enough for all programs, and at D = 128 for calls that are not short."""
    if feature == "padded":
        yield 72, 1, S, B
        yield 96, 4, S, B
        yield 200, 1, S, B
        return
    for group in GROUPS.get(feature, (1,)):
        yield 64, group, S, B
        yield 128, group, S, B
        if FEATURES[feature].mask is None and not FEATURES[feature].rich and not FEATURES[feature].deterministic:
            yield 256, group, S, B
        if feature.split()[-1] in ("full", "causal") and FEATURES[feature].mask is None:
            yield 128, group, SHORT, B
    if feature.split()[-1] in ("full", "causal", "softcap") and FEATURES[feature].mask is None:
        yield 64, 1, SHORT, MANY


def compiled_rows(names: list[str]) -> Iterator[dict[str, Any]]:
    for feature in names:
        for head_dim, group, length, batch in variants(feature):
            q = empty(batch, length, H, head_dim, dtype=torch.bfloat16)
            kv = empty(batch, length, H // group, head_dim, dtype=torch.bfloat16)
            lse = empty(batch, H, length, dtype=torch.float32)
            launch = backward_launches(q, None, q, kv, kv, q, lse, FEATURES[feature], (q, kv, kv))[1]
            used, said = compile_gluon_launch(launch)
            yield {
                "triton": triton.__version__, "feature": feature, "head_dim": head_dim, "group": group,
                "length": length, "whole": launch.constants["C"].whole,
                "late": launch.constants["C"].late, "shared": used.shared, "spills": used.spills,
                "in_loops": used.in_loops, "wgmma": used.wgmma, "tma": used.tma,
                "serialised": serialised(said),
            }  # fmt: skip


# Spilling instructions that are let pass: with Triton 3.7 it is 14, with 3.6 it is 43; of packed sequences, where an
# item begins and ends.
SPILLS = {
    ("two intervals", 128): 48, ("permuted", 128): 48, ("packed", 64): 13, ("softcap", 64): 2, ("softcap", 128): 2,
    ("softcap two intervals", 64): 6, ("softcap two intervals", 128): 32, ("softcap packed", 64): 26,
    ("dropout causal", 64): 30, ("dropout causal", 128): 33,
    ("dropout window", 128): 34, ("dropout packed full", 64): 20, ("dropout packed full", 128): 2,
    ("alibi causal", 64): 2, ("deterministic packed", 128): 2,
}  # fmt: skip
# And those of other releases: with 3.9 at D = 64 where an item begins and ends, too.
SPILLS |= {
    (3, 8): {("blocks", 128): 37, ("causal", 256): 2},
    (3, 9): {("full", 64): 8, ("causal", 64): 6, ("blocks", 64): 14, ("packed full", 64): 8},
}.get(release(), {})
# Of them in a loop over queries: two intervals a query need many registers, and so do draws; 3.8 takes more than
# others.
IN_LOOPS = {("two intervals", 128): 14, ("permuted", 128): 14, ("softcap two intervals", 128): 14}
IN_LOOPS |= {
    ("dropout causal", 64): 2, ("dropout causal", 128): 3, ("dropout window", 128): 7,
}  # fmt: skip
if release() == (3, 8):
    IN_LOOPS |= {("blocks", 128): 15, ("causal", 256): 1}


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, which is nothing, it is hoped."""
    found = []
    if row["spills"] > SPILLS.get((row["feature"], row["head_dim"]), 0):
        found.append("registers spilled")
    if row["in_loops"] > IN_LOOPS.get((row["feature"], row["head_dim"]), 0):
        found.append("registers spilled in a loop")
    if row["shared"] > 232_448:
        found.append("too much shared memory")
    if row["serialised"]:
        found.append("wgmma serialised")
    if not row["wgmma"] or not row["tma"]:
        found.append("no wgmma or TMA")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(FEATURES))
    parser.add_argument("--strict", action="store_true", help="fail where a row has faults")
    chosen = parser.parse_args()
    wrong = 0
    for row in compiled_rows(chosen.names):
        row["faults"] = faults(row)
        print(json.dumps(row), flush=True)
        wrong += bool(row["faults"])
    if chosen.strict and wrong:
        sys.exit(f"{wrong} kernels have faults under triton {triton.__version__}")


if __name__ == "__main__":
    main()
