"""The context-parallel methods: their traffic, their memory, and the automatic choice.

    all-to-all   every rank computes all tokens for some heads (Ulysses)
    all-gather   every rank computes its tokens against all keys, gathered some heads at a time; under masks such as
                 packed documents only the keys that it sees (gather.py)
    ring         keys and values go around, partial results are merged: the least memory
    hybrid       heads divided over some ranks, rings over the rest: 12 heads on 8 ranks as 4 x 2

Bl rows of a layout, S sequence, n tokens a rank holds (of all rows of its batch), R ranks, U of them dividing the
heads, H query heads, K key/value heads, D head dimension.

Memory for what is sent, received and reordered is counted from the code of heads.py and gather.py. It is within 10% of
the traced peaks of four gloo ranks on a CPU (MHA and GQA; without the kernels' own memory and gloo's copies; for the
all-to-all in one piece: memory of several pieces was only counted).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flashtrain.distributed.context.exchange import pieces_of
from flashtrain.distributed.context.layout import PLAIN, Layout
from flashtrain.errors import UserError, unknown
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, Mask

GRADIENT_BYTES = 4  # gradients of keys and values are summed in float32
ALL_TO_ALL, ALL_GATHER, RING, HYBRID, AUTO = "all-to-all", "all-gather", "ring", "hybrid", "auto"
WAYS = (ALL_TO_ALL, ALL_GATHER, RING, HYBRID)
# Largest size of gathered keys and values, of the heads that are computed and of the next ones; above it, a ring.
GATHER_BYTES = 4 * 2**30
# Largest share of other ranks' keys that a rank's queries may see for only these to be fetched.
MOST_FETCHED = 0.75
MASK_BYTES = 4 * (7 + 5)  # int32 rows of a mask of the whole sequence, and of the part for a rank's own tokens
SUM_BYTES = 4  # the gradients of a ring's queries are summed in float32


class Traffic(NamedTuple):
    """Bytes that the busiest rank sends for one layer and one row, in the forward and in the backward pass."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def seen_keys(layout: Layout, mask: Mask) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """For every row and rank: (the row's tokens on all ranks (R, n), the rank, which keys its queries see (S,) bool).

    Reads the mask's numbers on the host.
    """
    rows = mask.queries.cpu().numpy()
    pairs = [(LOW, HIGH), (LOW2, HIGH2)][: 1 if len(rows) == 5 else 2]
    for row in range(max(layout.tokens.shape[0], rows.shape[1])):
        of_mask = rows[:, row if rows.shape[1] > 1 else 0]
        tokens = layout.tokens[row if layout.tokens.shape[0] > 1 else 0].numpy()
        for rank in range(layout.degree):
            mine = tokens[rank][tokens[rank] >= 0]
            edges = np.zeros(mask.seqlen_k + 1, dtype=np.int64)
            for low, high in pairs:
                first = of_mask[low, mine].clip(0, mask.seqlen_k)
                past = np.maximum(first, of_mask[high, mine].clip(0, mask.seqlen_k))
                edges += np.bincount(first, minlength=len(edges)) - np.bincount(past, minlength=len(edges))
            yield tokens, rank, edges.cumsum()[:-1] > 0


def remote_keys(layout: Layout, mask: Mask) -> np.ndarray:
    """(R,) int64: the distinct keys of other ranks that each rank's queries see, summed over the rows.

    No exchange of keys can bring a rank fewer. Short documents that stay on one rank make it smaller.
    """
    needed = np.zeros(layout.degree, dtype=np.int64)
    for tokens, rank, seen in seen_keys(layout, mask):
        seen[tokens[rank][tokens[rank] >= 0]] = False
        needed[rank] += int(seen.sum())
    return needed


def needed_places(layout: Layout, mask: Mask) -> list[list[np.ndarray]]:
    """[rank][other]: the places (of n) in the other rank's part with a token that the rank's queries see in any row.

    Ascending; empty for the rank's own part.
    """
    held = layout.held
    needed = np.zeros((layout.degree, layout.degree, held), dtype=bool)
    for tokens, rank, seen in seen_keys(layout, mask):
        needed[rank] |= (tokens >= 0) & seen[tokens.clip(0)]
    return [
        [np.flatnonzero(places) if other != rank else np.zeros(0, dtype=np.int64) for other, places in enumerate(mine)]
        for rank, mine in enumerate(needed)
    ]


def fetched_share(needed: Sequence[Sequence[np.ndarray]], held: int) -> float:
    """The largest share, 0 to 1, of the other ranks' places that a rank needs."""
    others = max(1, (len(needed) - 1) * held)
    return max(sum(len(places) for places in mine) for mine in needed) / others


def traffic(
    held: int,
    degree: int,
    heads_degree: int,
    gathers: bool,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_each: int,
) -> Traffic:
    """What one rank sends.

    Args:
        held: tokens that each rank holds.
        degree: R.
        heads_degree: ranks that divide the heads (all-to-all: the degree; ring: 1; hybrid: between). The others form
            rings.
        gathers: they gather all keys and values instead.
        heads, kv_heads, head_dim: H, K, D.
        bytes_each: of an element of q, k and v.
    """
    # The backward sends all of it again, and the gradients back, those of keys and values in float32 if they are summed
    # on the way.
    token = head_dim * bytes_each
    gradient = head_dim * GRADIENT_BYTES
    if gathers:
        others = (degree - 1) * held * 2 * kv_heads
        return Traffic(others * token, others * (token + gradient))
    copies = math.lcm(kv_heads, heads_degree)  # key/value heads that are repeated so that every rank gets some
    away = held * (heads_degree - 1) / heads_degree
    around = held * 2 * copies  # a ring passes on the tokens of the ranks that divide the heads, a share of the heads
    steps = degree // heads_degree - 1
    forward = away * (2 * heads + 2 * copies) * token + steps * around * token
    backward = away * (4 * heads + 4 * copies) * token
    if steps:
        backward += steps * around * token + (steps + 1) * around * gradient
    return Traffic(int(forward), int(backward))


@dataclass(frozen=True)
class Choice:
    """A method, the ranks that divide the heads under it, its traffic, and the reason for it in one line."""

    way: str
    heads_degree: int
    traffic: Traffic
    reason: str

    def of_seen(self, share: float) -> Choice:
        """The all-gather of the share of other ranks' keys that is seen (gather.py)."""
        moved = Traffic(round(share * self.traffic.forward), round(share * self.traffic.backward))
        reason = f"{self.way}: of the {share:.0%} of other ranks' keys that are seen, {_size(moved.total)} a rank,"
        return replace(self, traffic=moved, reason=f"{reason} layer and step")


def choose_way(
    way: str, *, degree: int, heads: int, kv_heads: int, head_dim: int, held: int, bytes_each: int = 2
) -> Choice:
    """The named method, or for "auto" the one with the least traffic (on two ranks the ring, the fastest measured).

    Args:
        way: the method's name, or "auto".
        degree, heads, kv_heads, head_dim: R, H, K, D.
        held: n, over all rows of the batch.
        bytes_each: of an element of q, k and v.

    Raises:
        UserError: an unknown name, or a method that does not fit the heads.
    """
    if way not in (*WAYS, AUTO):
        raise unknown("context-parallel method", way, (*WAYS, AUTO))

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
        return of(way, degree, f"requested, {heads} heads over {degree} ranks")
    if way == HYBRID:
        if not 1 < shared < degree:
            raise UserError(_does_not_divide(way, heads, degree))
        return of(way, shared, f"requested, {heads} heads over {shared} ranks x rings of {degree // shared}")
    if way in (ALL_GATHER, RING):
        return of(way, 1, f"requested, on {degree} ranks")
    if degree == 1:
        return of(ALL_TO_ALL, 1, "one rank holds everything")
    if degree == 2:  # recipes/results/context-two-gpus-h200.json: under causal masks, of 32K and 128K tokens
        return of(RING, 1, "the fastest on two ranks")
    gathered = 4 * held * degree * max(1, kv_heads // 4) * head_dim * bytes_each
    possible = []
    if heads % degree == 0:
        possible.append(of(ALL_TO_ALL, degree, f"{heads} heads divide over {degree} ranks"))
    if gathered <= GATHER_BYTES:
        possible.append(of(ALL_GATHER, 1, f"keys and values of {kv_heads} heads are small enough to gather"))
    if 1 < shared < degree:
        rings = degree // shared
        possible.append(
            of(HYBRID, shared, f"{heads} heads divide over {shared} of {degree} ranks, in rings of {rings}")
        )
    if not possible:
        return of(RING, 1, f"{heads} heads do not divide over {degree} ranks, and gathering takes {_size(gathered)}")
    return min(possible, key=lambda choice: choice.traffic.total)


class Chosen(NamedTuple):
    """The choice for one mask in one layout, and the usual one for any mask.

    `needed`: needed_places, if only the keys that are seen are gathered; else None.
    """

    choice: Choice
    usual: Choice
    needed: list[list[np.ndarray]] | None = None


def choose_for(mask: Mask, layout: Layout, way: str, *, dropout: bool, **sizes: int) -> Chosen:
    """choose_way for this mask in this layout, the same on every rank; `sizes` are choose_way's.

    Only the keys that are seen are gathered, if they are few, and the all-gather was requested or has the least
    traffic.
    """
    degree = layout.degree
    usual = choose_way(way, degree=degree, **sizes)
    # Dropout draws by positions in the sequence; under a plain mask nearly all keys are seen.
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
            f"{way} with {heads} heads on {degree} ranks. Use a degree that divides the heads ({degrees}), or "
            f"{other}all-gather or ring on {degree}."
        )
    hint = "all-to-all, " if heads % degree == 0 else ""
    share = "all of" if shared == degree else "none of"
    return (
        f"{way} with {heads} heads on {degree} ranks, which share {share} their divisors. Use a degree that "
        f"shares some of the divisors {degrees}, or {hint}all-gather or ring on {degree}."
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def exchange_bytes(
    choice: Choice, *, held: int, degree: int, heads: int, kv_heads: int, head_dim: int, bytes_each: int = 2
) -> int:
    """Bytes for communication on one rank at the peak of a layer's attention, which is in its backward.

    They are freed before the next layer. The forward needs fewer: no gradients, and a ring merges partial results in
    place. `held` is n, `bytes_each` of an element of q, k and v.
    """
    if degree == 1:
        return 0
    whole = held * degree * MASK_BYTES
    queries = held * heads * head_dim
    if choice.way == ALL_GATHER:
        return whole + _gathered(held, degree, kv_heads, head_dim, bytes_each) + queries * bytes_each
    numbers = 2 * held * math.lcm(kv_heads, choice.heads_degree) * head_dim  # of keys and values, heads repeated
    divided = choice.heads_degree > 1
    # Among the ranks that divide the heads: q, k, v, output and its gradient go there, three gradients come back.
    there, back = (3 * queries + numbers) * bytes_each * divided, (queries + numbers) * bytes_each * divided
    peak = 2 * there + 3 * back
    if choice.heads_degree == degree:
        # Each rank's own heads go in pieces: one at hand, one coming, and of those that left what came in return.
        own = math.lcm(kv_heads, degree) // degree
        pieces = len(pieces_of(own, own))
        peak = peak if pieces == 1 else max(3 * back, (4 * there + 3 * back) // pieces + back)
    else:
        # Keys and values at hand and coming, their gradients as computed; in float32 those leaving and those coming.
        ring = 3 * numbers * bytes_each + 2 * numbers * GRADIENT_BYTES + queries * SUM_BYTES
        peak = max(peak, ring + 2 * there)
    return whole + peak


def _gathered(held: int, degree: int, kv_heads: int, head_dim: int, bytes_each: int) -> int:
    pieces = len(pieces_of(kv_heads, kv_heads))
    numbers = 2 * held * degree * (kv_heads // pieces) * head_dim  # of one piece's keys and values, all ranks'
    # This piece as gathered, joined and in order, its gradients, and the next one. In float32 its gradients whole,
    # dealt and without padding, and the sums for this rank's tokens of every piece.
    sums = pieces * numbers // degree
    return 5 * numbers * bytes_each + (3 * numbers + sums) * GRADIENT_BYTES
