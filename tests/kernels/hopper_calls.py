"""Calls of the Hopper kernels by the name of what they ask for, on tensors without data, and
what compiling them shows.

B batch, H query heads.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from ahead_of_time import Compiled, empty, report, serialised

from flashtrain_kernels.backends.hopper import backward, forward_tiles
from flashtrain_kernels.masks import Mask, Plan, Sequences
from flashtrain_kernels.masks.block_sparse import BlockMask
from flashtrain_kernels.options import Options

B, H = 2, 4
SHARED_MEMORY = 232_448  # bytes that one block may use
BANDS = {"full": (None, None), "causal": (None, 0), "window": (-256, 0)}
WINDOWS = {"packed": (-1, 0), "packed full": (-1, -1), "packed window": (256, 0)}


def intervals(count: int, length: int, permuted: bool = False) -> Mask:
    table = empty(B, 8, 16, dtype=torch.int32)
    plan = Plan(
        table,
        table,
        table,
        (*forward_tiles.PLANNED[64], *forward_tiles.PLANNED[64], *backward.PLANNED[64]),
    )
    keys = empty(B, length, dtype=torch.int32) if permuted else None
    return Mask(empty(3 + 2 * count, B, length, dtype=torch.int32), keys, length, plan)


def blocks(length: int) -> BlockMask:
    rows, places = empty(1, H, 8, 3, dtype=torch.int64), empty(100, dtype=torch.int32)
    return BlockMask(rows, places, rows, places, (128, 128), length, length, None, 0)


def options(feature: str, length: int, sequences: int) -> Options:
    """What a call of this feature asks for; a band or a mask may follow what changes scores, else
    they are causal. sequences: of a packed row."""
    first, _, rest = feature.partition(" ")
    rich: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 30.0},
        "dropout": {"dropout_p": 0.1, "seed": empty(3, dtype=torch.int64)},
        "alibi": {"alibi_slopes": empty(H, dtype=torch.float32)},
        "deterministic": {"deterministic": True},
    }
    if first in rich:
        return replace(options(rest or "causal", length, sequences), **rich[first])
    if feature in BANDS:
        left, right = BANDS[feature]
        return Options(0.125, left=left, right=right)
    if feature in WINDOWS:
        ends = empty(sequences + 1, dtype=torch.int32)
        return Options(0.125).by_boundaries(Sequences(ends, ends, length, length, WINDOWS[feature]))
    if feature == "blocks":
        return Options(0.125, right=0, mask=blocks(length))
    count = 2 if feature in ("two intervals", "permuted") else 1
    permuted = feature in ("permuted", "positions")
    return Options(0.125, mask=intervals(count, length, permuted=permuted))


def used(compiled: Compiled, said: str) -> dict[str, Any]:
    """What a row tells of a compiled kernel. said: by ptxas."""
    return {
        "registers": compiled.registers, "shared": compiled.shared, "spills": compiled.spills,
        "in_loops": compiled.in_loops, "wgmma": compiled.wgmma, "tma": compiled.tma,
        "serialised": serialised(said),
    }  # fmt: skip


def faults(row: dict[str, Any], spills: int, in_loops: int) -> list[str]:
    """What is wrong with a row, which is nothing, it is hoped. spills, in_loops:
    instructions that are let pass."""
    wrong = {
        "registers spilled": row["spills"] > spills,
        "registers spilled in a loop": row["in_loops"] > in_loops,
        "too much shared memory": row["shared"] > SHARED_MEMORY,
        "no wgmma or no TMA": not row["wgmma"] or not row["tma"],
        "wgmma serialised": row["serialised"],
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]


def main(
    features: Iterable[str],
    rows: Callable[[list[str]], Iterator[dict[str, Any]]],
    spills: dict[tuple[str, int], int],
    in_loops: dict[tuple[str, int], int],
) -> None:
    """Print the rows of the features that the command names, of all where it names none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("features", nargs="*", default=list(dict.fromkeys(features)))
    parser.add_argument("--strict", action="store_true", help="fail where a row has faults")
    chosen = parser.parse_args()

    def judged() -> Iterator[dict[str, Any]]:
        for row in rows(chosen.features):
            case = row["feature"], row["head_dim"]
            yield row | {"faults": faults(row, spills.get(case, 0), in_loops.get(case, 0))}

    report(judged(), chosen.strict)
