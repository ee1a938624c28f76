"""The context-parallel methods, and the automatic choice among them.

ulysses     every rank computes some of the heads, for all tokens
all-gather  every rank computes its own queries against all keys, which it gathers some heads at a
            time; with packed documents it gathers only the keys that its queries see
ring        keys and values go from rank to rank, and partial results are merged
hybrid      ulysses within groups of ranks, rings between them: 12 heads on 8 ranks as groups of 4,
            rings of 2; on several machines the groups are within one
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.distributed.context.cost import expected_seconds
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import PLAIN
from flashtrain.distributed.context.needed_keys import (
    MAX_FETCHED,
    Needed,
    fetched_share,
    needed_keys,
)
from flashtrain.distributed.context.traffic import Sizes, Traffic, traffic
from flashtrain.distributed.context.work import visible_keys
from flashtrain.errors import UserError
from flashtrain_kernels.masks import Mask

ULYSSES, ALL_GATHER, RING, HYBRID, AUTO = "ulysses", "all-gather", "ring", "hybrid", "auto"
METHODS = (ULYSSES, ALL_GATHER, RING, HYBRID)
# Largest size of gathered keys and values, of the heads that are computed and of the next
# ones; above it, a ring.
MAX_GATHERED_BYTES = 4 * 2**30
# What hybrid must gain, as a share of the time: it is two methods at once, and was not
# timed within one machine.
HYBRID_LEAST = 0.02


@dataclass(frozen=True)
class Choice:
    """A context-parallel method and why it was chosen."""

    method: str
    sizes: Sizes  # of the attention
    heads_degree: int  # the number of ranks that divide the heads
    traffic: Traffic  # the bytes that the busiest rank sends for one layer
    why: str  # the reason, in words


def choose_method(method: str, sizes: Sizes, *, hybrid: bool = True) -> Choice:
    """Return the named method, for "auto" the one with the least expected time (cost.py).

    Args:
        method: "ulysses", "all-gather", "ring", "hybrid" or "auto".
        sizes: the sizes of the attention.
        hybrid: whether hybrid is possible.

    Raises:
        UserError: the method does not fit the heads.
    """
    heads, degree = sizes.heads, sizes.degree
    near = sizes.near if sizes.near > 1 else degree
    divisors = [
        number for number in range(2, degree) if degree % number == 0 and heads % number == 0
    ]
    fitting = {
        ALL_GATHER: [1],
        RING: [1],
        ULYSSES: [degree] * (heads % degree == 0),
        HYBRID: divisors * hybrid,
    }

    def choice(name: str, heads_degree: int, why: str) -> Choice:
        how = f"{heads} heads over {heads_degree} ranks"
        if heads_degree == 1:
            how = f"on {degree} ranks"
        how += f" x rings of {degree // heads_degree}" if name == HYBRID else ""
        sent = traffic(sizes, heads_degree, gathers=name == ALL_GATHER)
        return Choice(name, sizes, heads_degree, sent, why.format(how))

    if method != AUTO:
        if not fitting[method]:
            possible = ", ".join(
                str(number) for number in range(2, heads + 1) if heads % number == 0
            )
            others = " or ".join(name for name, degrees in fitting.items() if degrees)
            raise UserError(
                f"{method} with {heads} heads on {degree} ranks. Use {others}, or another number "
                f"of ranks (the heads divide by {possible or 'none'})."
            )
        within = [number for number in fitting[method] if near % number == 0]  # one machine
        return choice(method, max(within or fitting[method]), "requested, {}")
    if degree == 1:
        return choice(ULYSSES, 1, "one rank holds everything")
    gathered = (
        4 * sizes.held * degree * max(1, sizes.kv_heads // 4) * sizes.head_dim * sizes.bytes_each
    )
    if gathered > MAX_GATHERED_BYTES:
        del fitting[ALL_GATHER]
    # Heads are divided within one machine: to the others a rank has a fifth of the
    # bytes a second, or less.
    ways = [
        (name, number)
        for name, degrees in fitting.items()
        for number in degrees
        if near % number == 0
    ]

    def seconds(way: tuple[str, int]) -> float:
        return expected_seconds(sizes, way[1], gathers=way[0] == ALL_GATHER) * (
            1 + HYBRID_LEAST * (way[0] == HYBRID)
        )

    least = min(ways, key=seconds)
    return choice(*least, "{}, the least expected time")


def gather_needed(
    usual: Choice, requested: str, mask: Mask, layout: Layout
) -> tuple[Choice, Needed | None]:
    """Choose whether to gather only the keys that each rank's queries see: if these are few and,
    with "auto", if that takes less time.

    The choice is the same on every rank.

    Args:
        usual: the choice without regard to the mask (choose_method).
        requested: the requested method, or "auto".
        mask: the mask of the whole sequence.
        layout: which rank holds which tokens.

    Returns:
        (the choice, the keys to gather), or (usual, None) where the usual method is used.
    """
    sizes = usual.sizes
    # Under a plain mask nearly all keys are seen.
    if requested not in (AUTO, ALL_GATHER) or sizes.degree == 1 or mask.band in PLAIN:
        return usual, None
    needed = needed_keys(layout, mask)
    share = fetched_share(needed, layout.held)
    sent = Traffic(*(round(share * part) for part in traffic(sizes, 1, gathers=True)))
    costs = visible_keys(mask)
    sizes = sizes._replace(visible=int(costs.sum()) / costs.numel())
    needs = expected_seconds(sizes, 1, gathers=True, share=share)
    takes = expected_seconds(sizes, usual.heads_degree, gathers=usual.method == ALL_GATHER)
    if share > MAX_FETCHED or (requested == AUTO and needs >= takes):
        return usual, None
    return Choice(
        ALL_GATHER, sizes, 1, sent, f"of the {share:.0%} of other ranks' keys that are seen"
    ), needed
