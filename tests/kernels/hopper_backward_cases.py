"""Compile the Hopper backward ahead of time, for sm_90 with no GPU, and print what
each variant uses as JSON.

    python hopper_backward_cases.py [--strict] [names of features]

B batch, S sequence, H query heads, K key/value heads (H / group), D head dimension.
"""

from collections.abc import Iterator
from typing import Any

import torch
from ahead_of_time import compile_gluon_launch, empty
from hopper_calls import B, H, main, options, used

from flashtrain_kernels.backends import Call, Gradients
from flashtrain_kernels.backends.hopper.backward import LATE_QUERIES, backward_launches
from flashtrain_kernels.environment import release
from flashtrain_kernels.options import Options

S = 1024
SHORT, MANY = LATE_QUERIES // 2, 132  # batch rows that give every program a whole head
# padded: head dimensions that are computed as 128 or 256
FEATURES = (
    "full", "causal", "window", "intervals", "two intervals", "permuted", "positions", "blocks",
    "packed",
    "packed full",
    "packed window", "softcap", "softcap two intervals", "softcap packed", "deterministic",
    "deterministic window",
    "deterministic packed", "padded", "dropout causal", "dropout window", "dropout packed full",
    "alibi causal",
    "alibi packed full",
)  # fmt: skip
GROUPS = {
    "dropout causal": (4,), "alibi causal": (4,), "full": (1, 4), "causal": (1, 4),
    "deterministic": (1, 4),
    "blocks": (1, 2), "intervals": (1, 2), "packed": (1, 4),
}  # fmt: skip


def requested(feature: str) -> Options:
    return options("causal" if feature == "padded" else feature, S, sequences=1)


def variants(feature: str) -> Iterator[tuple[int, int, int, int]]:
    """Head dimension, group, length and batch of a feature's kernels. There are others at
    D = 64 for short calls whose heads are enough for all programs, and at D = 128 for
    calls that are not short."""
    if feature == "padded":
        yield 72, 1, S, B
        yield 96, 4, S, B
        yield 200, 1, S, B
        return
    call = requested(feature)
    if feature == "positions":  # with two intervals: permuted
        yield 256, 1, S, B
        return
    for group in GROUPS.get(feature, (1,)):
        yield 64, group, S, B
        yield 128, group, S, B
        if group > 1 and call.mask is None:  # heads that are not split among items
            yield 64, group, S, MANY
            yield 128, group, S, MANY
        # Which always are deterministic.
        wide = "blocks" not in feature and "two" not in feature and feature != "permuted"
        if wide and not call.beyond_softcap and not call.deterministic:
            yield 256, group, S, B
        if feature.split()[-1] in ("full", "causal") and call.mask is None:
            yield 128, group, SHORT, B
    if feature.split()[-1] in ("full", "causal", "softcap") and call.mask is None:
        yield 64, 1, SHORT, MANY


def rows(features: list[str]) -> Iterator[dict[str, Any]]:
    """What each kernel of these features uses."""
    for feature in features:
        for head_dim, group, length, batch in variants(feature):
            q = empty(batch, length, H, head_dim, dtype=torch.bfloat16)
            kv = empty(batch, length, H // group, head_dim, dtype=torch.bfloat16)
            lse = empty(batch, H, length, dtype=torch.float32)
            call = Call(q, kv, kv, requested(feature))
            _, launch, *of_queries, _ = backward_launches(
                call, Gradients(q, None, q, lse, q, kv, kv, None)
            )
            choices = launch.constants["C"]
            row = {
                "feature": feature, "head_dim": head_dim, "group": group, "split": choices.split,
                "length": length,
                "whole": choices.whole, "late": choices.late,
            }  # fmt: skip
            yield row | used(*compile_gluon_launch(launch))
            for launch in of_queries:
                yield row | {"feature": f"{feature}, dQ", **used(*compile_gluon_launch(launch))}


# Spilling instructions that are let pass, the more of Triton 3.6's and 3.7's; of packed sequences,
# where an item begins and ends.
SPILLS = {
    ("two intervals", 128): 48, ("permuted", 128): 48, ("softcap", 64): 2, ("softcap", 128): 18,
    ("softcap two intervals", 64): 6, ("softcap two intervals", 128): 32, ("softcap packed", 64): 4,
    ("softcap packed", 128): 4, ("dropout causal", 64): 30, ("dropout causal", 128): 33,
    ("dropout window", 128): 34, ("dropout packed full", 64): 20, ("dropout packed full", 128): 6,
    ("alibi causal", 64): 2, ("deterministic packed", 128): 2, ("window, dQ", 256): 2,
    ("packed window, dQ", 256): 2, ("positions, dQ", 256): 26,
}  # fmt: skip
# And those of other releases: with 3.9 at D = 64 where an item begins and ends, too.
SPILLS |= {
    (3, 8): {("blocks", 128): 37, ("causal", 256): 2, ("intervals", 128): 6},
    (3, 9): {
        ("full", 64): 8, ("causal", 64): 6, ("blocks", 64): 14, ("packed full", 64): 8,
        ("causal", 128): 13,
        ("intervals", 128): 40, ("full, dQ", 256): 26, ("causal, dQ", 256): 37,
        ("window, dQ", 256): 35, ("intervals, dQ", 256): 75, ("packed, dQ", 256): 34,
        ("positions, dQ", 256): 129,
        ("softcap, dQ", 256): 38, ("padded, dQ", 200): 35,
    },
}.get(release(), {})  # fmt: skip
# Of them in a loop over queries: two intervals a query need many registers, and so do draws; 3.8
# takes more than others.
IN_LOOPS = {("two intervals", 128): 14, ("permuted", 128): 14, ("softcap two intervals", 128): 14}
IN_LOOPS |= {
    ("dropout causal", 64): 2, ("dropout causal", 128): 3, ("dropout window", 128): 7,
    ("dropout packed full", 128): 2,
    ("softcap", 128): 2, ("softcap packed", 128): 1, ("positions, dQ", 256): 12,
}  # fmt: skip
if release() == (3, 8):
    IN_LOOPS |= {("blocks", 128): 15, ("causal", 256): 1, ("positions, dQ", 256): 21}
if release() == (3, 9):
    IN_LOOPS |= {
        ("causal", 128): 2,
        ("intervals", 128): 9,
        ("full, dQ", 256): 10,
        ("causal, dQ", 256): 12,
    }
    IN_LOOPS |= {("window, dQ", 256): 12, ("softcap, dQ", 256): 16, ("padded, dQ", 200): 12}
    IN_LOOPS |= {("intervals, dQ", 256): 16, ("packed, dQ", 256): 12, ("positions, dQ", 256): 57}


if __name__ == "__main__":
    main(FEATURES, rows, SPILLS, IN_LOOPS)
