"""Which way attention is shared among ranks: by name, or chosen from heads, length and degree.

    all-to-all   every rank computes all tokens for some heads (Ulysses)
    all-gather   every rank computes its tokens against all keys, gathered some heads at a time; of packed documents
                 and the like only the keys that it sees (gather_seen.py)
    ring         keys and values go around, partial results are merged: the least memory
    hybrid       heads divided over some ranks, rings over the rest: 12 heads on 8 ranks as 4 x 2

n tokens a rank holds, R ranks, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flashtrain.distributed.context.layout import PLAIN, Layout
from flashtrain.distributed.context.traffic import Traffic, fetched_share, needed_places, traffic
from flashtrain.errors import UserError, unknown
from flashtrain_kernels.masks import Mask

ALL_TO_ALL, ALL_GATHER, RING, HYBRID, AUTO = "all-to-all", "all-gather", "ring", "hybrid", "auto"
WAYS = (ALL_TO_ALL, ALL_GATHER, RING, HYBRID)

# Gathered keys and values of the heads that are computed and of those that come meanwhile; past this, a ring.
GATHER_BYTES = 4 * 2**30
# Of other ranks' tokens, the share that a rank's queries may see for those alone to be fetched.
MOST_FETCHED = 0.75


@dataclass(frozen=True)
class Choice:
    """A way, the ranks that divide the heads under it, what it moves, and why it was taken, in one line."""

    way: str
    heads_degree: int
    traffic: Traffic
    reason: str

    def of_seen(self, share: float) -> Choice:
        """The all-gather of the share of other ranks' keys that is seen (gather_seen.py)."""
        moved = Traffic(round(share * self.traffic.forward), round(share * self.traffic.backward))
        reason = f"{self.way}: of the {share:.0%} of other ranks' keys that are seen, {_size(moved.total)} a rank,"
        return replace(self, traffic=moved, reason=f"{reason} layer and step")


def choose_way(
    way: str, *, degree: int, heads: int, kv_heads: int, head_dim: int, held: int, bytes_each: int = 2
) -> Choice:
    """The way of that name, or for "auto" the one that moves least; on two ranks the ring, which was measured fastest.

    held: n, of all rows of the batch. bytes_each: of a number of q, k and v. UserError: an unknown name, or a way that
    these heads do not divide into, with what would fit.
    """
    if way not in (*WAYS, AUTO):
        raise unknown("way of context parallelism", way, (*WAYS, AUTO))

    def of(name: str, heads_degree: int, reason: str) -> Choice:
        moved = traffic(
            held, degree, heads_degree, name == ALL_GATHER, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            bytes_each=bytes_each,
        )  # fmt: skip
        return Choice(name, heads_degree, moved, f"{name}: {reason}, {_size(moved.total)} a rank, layer and step")

    shared = math.gcd(heads, degree)
    if way == ALL_TO_ALL:
        if heads % degree:
            raise UserError(_does_not_divide(way, heads, degree))
        return of(way, degree, f"asked for, {heads} heads over {degree} ranks")
    if way == HYBRID:
        if not 1 < shared < degree:
            raise UserError(_does_not_divide(way, heads, degree))
        return of(way, shared, f"asked for, {heads} heads over {shared} ranks x rings of {degree // shared}")
    if way in (ALL_GATHER, RING):
        return of(way, 1, f"asked for, on {degree} ranks")
    if degree == 1:
        return of(ALL_TO_ALL, 1, "one rank holds everything")
    if degree == 2:  # recipes/results/context-two-gpus-h200.json: under causal masks, of 32K and 128K tokens
        return of(RING, 1, "the fastest on two ranks")
    gathered = 4 * held * degree * max(1, kv_heads // 4) * head_dim * bytes_each
    possible = []
    if heads % degree == 0:
        possible.append(of(ALL_TO_ALL, degree, f"{heads} heads divide over {degree} ranks"))
    if gathered <= GATHER_BYTES:
        possible.append(of(ALL_GATHER, 1, f"keys and values of {kv_heads} heads are little to gather"))
    if 1 < shared < degree:
        rings = degree // shared
        possible.append(
            of(HYBRID, shared, f"{heads} heads divide over {shared} of {degree} ranks, in rings of {rings}")
        )
    if not possible:
        return of(RING, 1, f"{heads} heads do not divide over {degree} ranks, and gathering takes {_size(gathered)}")
    return min(possible, key=lambda choice: choice.traffic.total)


class Chosen(NamedTuple):
    """choice: for one mask in one layout; usual: for any. needed: of traffic.needed_places, where only what is seen of
    other ranks' keys is to be gathered, else None."""

    choice: Choice
    usual: Choice
    needed: list[list[np.ndarray]] | None = None


def choose_for(mask: Mask, layout: Layout, way: str, *, dropout: bool, **sizes: int) -> Chosen:
    """choose_way for this mask in this layout: what is seen alone is gathered where it is little, and the all-gather
    was asked for, or "auto" and it moves least.

    sizes: heads, kv_heads, head_dim, held, bytes_each, as choose_way's. Every rank comes to the same choice.
    """
    degree = layout.degree
    usual = choose_way(way, degree=degree, **sizes)
    # Dropout draws by the keys' positions in the sequence; under a plain mask nearly everything is seen.
    if way not in (AUTO, ALL_GATHER) or degree == 1 or dropout or mask.band in PLAIN:
        return Chosen(usual, usual)
    needed = needed_places(layout, mask)
    share = fetched_share(needed, layout.held)
    if share > MOST_FETCHED:
        return Chosen(usual, usual)
    seen = choose_way(ALL_GATHER, degree=degree, **sizes).of_seen(share)
    if way == AUTO and seen.traffic.total >= usual.traffic.total:
        return Chosen(usual, usual)
    return Chosen(seen, usual, needed)


def _does_not_divide(way: str, heads: int, degree: int) -> str:
    divisors = [number for number in range(2, heads + 1) if heads % number == 0]
    degrees = ", ".join(map(str, divisors)) or "none but 1"
    shared = math.gcd(heads, degree)
    if way == ALL_TO_ALL:
        other = "hybrid, " if 1 < shared < degree else ""
        return (
            f"{way} with {heads} heads on {degree} ranks. Possible: a degree that divides the heads ({degrees}), or "
            f"{other}all-gather or ring on {degree}."
        )
    hint = "all-to-all, " if heads % degree == 0 else ""
    share = "all of" if shared == degree else "none of"
    return (
        f"{way} with {heads} heads on {degree} ranks, which share {share} their divisors. Possible: a degree that "
        f"shares some of the divisors {degrees}, or {hint}all-gather or ring on {degree}."
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
