"""Compile the Gluon forward for sm_90, for GPUs that need not be there, and print what
each kernel uses as JSON.

Run as a program: python hopper_forward_cases.py [--strict] [names of features]

B batch, S sequence, H query heads, K key/value heads (H / group), D head dimension.
"""

from collections.abc import Iterator
from typing import Any

import torch
from ahead_of_time import compile_gluon_launch, empty
from hopper_calls import B, H, main, options, used

from flashtrain_kernels.backends import Call
from flashtrain_kernels.backends.hopper import forward_tiles
from flashtrain_kernels.backends.hopper.forward import forward_launches
from flashtrain_kernels.environment import release

# Feature, D, S, group: every tile of forward_tiles.py at least once.
CASES = [
    ("full", 64, 512, 1), ("full", 64, 4096, 1), ("causal", 64, 512, 1), ("causal", 64, 4096, 1),
    ("causal", 64, 32768, 1), ("window", 64, 4096, 1), ("intervals", 64, 4096, 2),
    ("two intervals", 64, 4096, 1),
    ("blocks", 64, 4096, 1), ("full", 128, 512, 1), ("full", 128, 4096, 1), ("causal", 128, 512, 4),
    ("causal", 128, 4096, 4), ("causal", 128, 32768, 1), ("window", 128, 4096, 1),
    ("intervals", 128, 4096, 1),
    ("two intervals", 128, 4096, 1), ("permuted", 128, 4096, 1), ("blocks", 128, 4096, 1),
    ("causal", 72, 512, 1),
    ("causal", 192, 4096, 1), ("window", 192, 4096, 4),
    ("full", 256, 4096, 1), ("causal", 256, 4096, 1), ("window", 256, 4096, 1),
    ("packed", 64, 2048, 1),
    ("packed", 64, 32768, 4), ("packed", 128, 2048, 4), ("packed", 128, 32768, 1),
    ("packed full", 64, 32768, 1),
    ("packed full", 128, 32768, 1), ("packed window", 64, 32768, 1),
    ("packed window", 128, 32768, 4),
    ("softcap", 64, 512, 1), ("softcap", 64, 4096, 1), ("softcap", 128, 4096, 4),
    ("softcap", 128, 32768, 1),
    ("softcap", 256, 4096, 1), ("packed", 256, 32768, 4), ("packed full", 256, 32768, 1),
    ("packed window", 256, 32768, 4), ("intervals", 256, 4096, 4), ("positions", 256, 4096, 1),
    ("softcap packed", 256, 32768, 1),
    ("softcap intervals", 256, 4096, 1),
    ("softcap full", 128, 4096, 1), ("softcap intervals", 128, 4096, 1),
    ("softcap packed", 128, 32768, 1),
    ("dropout causal", 64, 512, 1), ("dropout causal", 128, 4096, 4),
    ("dropout causal", 128, 32768, 1),
    ("dropout packed full", 64, 32768, 1), ("dropout packed full", 128, 32768, 1),
    ("dropout packed", 128, 2048, 4),
    ("alibi causal", 64, 512, 1),
    ("alibi causal", 128, 4096, 4), ("alibi packed full", 64, 32768, 1),
    ("alibi packed", 128, 32768, 1),
]  # fmt: skip
# Spilling instructions that are let pass: outside the loop over keys, in setting up a tile and in
# the pass after a NaN.
SPILLS = {
    ("causal", 72): 8, ("causal", 256): 60, ("window", 256): 105, ("packed", 64): 68,
    ("packed", 128): 35, ("packed", 256): 149, ("intervals", 256): 144, ("positions", 256): 129,
    ("packed full", 64): 30, ("packed full", 128): 25, ("packed full", 256): 131,
    ("packed window", 128): 25, ("packed window", 256): 173, ("softcap", 64): 44,
    ("softcap", 256): 66,
    ("softcap packed", 128): 31, ("softcap packed", 256): 121, ("softcap intervals", 128): 25,
    ("softcap intervals", 256): 130, ("intervals", 128): 22,
    ("dropout packed full", 128): 63,
    ("dropout causal", 128): 71, ("alibi causal", 64): 17, ("alibi packed full", 64): 46,
    ("alibi packed", 128): 46,
}  # fmt: skip
# And those of releases that keep more of the arguments in memory meanwhile.
SPILLS |= {
    (3, 6): {
        ("two intervals", 64): 15, ("intervals", 128): 25, ("packed", 128): 64,
        ("packed full", 64): 63, ("packed full", 128): 62, ("packed window", 128): 70,
        ("dropout packed full", 128): 84, ("alibi packed full", 64): 57, ("alibi packed", 128): 81,
    },
    (3, 8): {
        ("causal", 64): 3, ("blocks", 64): 8, ("causal", 128): 11, ("window", 128): 11,
        ("blocks", 128): 16,
        ("causal", 256): 94, ("packed", 128): 13, ("packed full", 128): 77,
        ("packed window", 128): 13, ("positions", 256): 272,
    },
    (3, 9): {
        ("causal", 256): 67, ("window", 256): 110, ("packed full", 64): 63,
        ("packed full", 128): 95,
        ("packed window", 128): 38, ("positions", 256): 351,
    },
}.get(release(), {})  # fmt: skip
# Of them in the loop over keys.
IN_LOOPS = {("causal", 256): 1, ("window", 256): 1} if release() >= (3, 8) else {}
if release() == (3, 6):  # of programs that take tiles of packed rows from a counter
    _PACKED = ("packed", "packed full", "packed window", "dropout packed full", "alibi packed")
    IN_LOOPS |= {(feature, 128): 4 for feature in _PACKED}
# The most under key positions at D = 256 with 3.8 and 3.9, which no GPU has run.
if release() == (3, 8):
    IN_LOOPS |= {("packed", 256): 8, ("positions", 256): 18}
if release() == (3, 9):
    IN_LOOPS |= {("packed", 256): 15, ("positions", 256): 77}


def rows(features: list[str]) -> Iterator[dict[str, Any]]:
    """What each kernel of the cases of these features uses."""
    for feature, head_dim, length, group in CASES:
        if feature not in features:
            continue
        given = options(feature, length, sequences=8)
        # Values of 128 beside queries and keys of 192 are those of multi-head latent attention.
        value_dim = 128 if head_dim == 192 else head_dim
        q, out = (
            empty(B, length, H, width, dtype=torch.bfloat16) for width in (head_dim, value_dim)
        )
        k, v = (
            empty(B, length, H // group, width, dtype=torch.bfloat16)
            for width in (head_dim, value_dim)
        )
        tile = forward_tiles.forward_tile(q, k, given)
        lse = empty(B, H, length, dtype=torch.float32)
        *_, launch = forward_launches(Call(q, k, v, given), out, lse)
        yield {
            "feature": feature, "head_dim": head_dim, "length": length, "group": group,
            "tile": list(tile),
            **used(*compile_gluon_launch(launch)),
        }  # fmt: skip


if __name__ == "__main__":
    main([case[0] for case in CASES], rows, SPILLS, IN_LOOPS)
