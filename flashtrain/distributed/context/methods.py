"""The context-parallel methods, and the automatic choice among them.

ulysses      every rank computes some of the heads, for all tokens
all-gather   every rank computes its own queries against all keys, which it gathers some heads at a time; with packed
             documents it gathers only the keys that its queries see
ring         keys and values go from rank to rank, and partial results are merged: the least memory
hybrid       ulysses within groups of ranks, rings between them: 12 heads on 8 ranks as groups of 4, rings of 2; on
             several machines the groups are within one
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import PLAIN
from flashtrain.distributed.context.needed_keys import Needed, fetched_share, needed_keys
from flashtrain.distributed.context.traffic import Sizes, Traffic, traffic
from flashtrain.errors import UserError
from flashtrain_kernels.masks import Mask

ULYSSES, ALL_GATHER, RING, HYBRID, AUTO = "ulysses", "all-gather", "ring", "hybrid", "auto"
METHODS = (ULYSSES, ALL_GATHER, RING, HYBRID)
# Largest size of gathered keys and values, of the heads that are computed and of the next ones; above it, a ring.
MAX_GATHERED_BYTES = 4 * 2**30
# Largest share of other ranks' keys that a rank's queries may see for only these to be fetched.
MAX_FETCHED = 0.75


@dataclass(frozen=True)
class Choice:
    """A context-parallel method and why it was chosen."""

    method: str
    sizes: Sizes  # of the attention
    heads_degree: int  # the number of ranks that divide the heads
    traffic: Traffic  # the bytes that the busiest rank sends for one layer
    why: str  # the reason, in words

    @property
    def reason(self) -> str:
        """One line with the method, the reason for it and its traffic, for the log."""
        return f"{self.method}: {self.why}, {_size(self.traffic.total)} a rank, layer and step"


def choose_method(method: str, sizes: Sizes) -> Choice:
    """Return the named method, for "auto" the one with the least traffic (on two ranks the ring, measured as fastest).

    Args:
        method: "ulysses", "all-gather", "ring", "hybrid" or "auto".
        sizes: the sizes of the attention.

    Raises:
        UserError: the method does not fit the heads.
    """
    heads, degree = sizes.heads, sizes.degree
    shared = math.gcd(heads, sizes.near if sizes.near > 1 else degree)
    fitting = {ALL_GATHER: (1, f"on {degree} ranks"), RING: (1, f"on {degree} ranks")}
    if heads % degree == 0:
        fitting[ULYSSES] = degree, f"{heads} heads over {degree} ranks"
    if 1 < shared < degree:
        fitting[HYBRID] = shared, f"{heads} heads over {shared} ranks x rings of {degree // shared}"

    def choice(name: str, why: str = "") -> Choice:
        heads_degree, how = fitting[name]
        return Choice(name, sizes, heads_degree, traffic(sizes, heads_degree, gathers=name == ALL_GATHER), why or how)

    if method != AUTO:
        if method not in fitting:
            divisors = ", ".join(str(number) for number in range(2, heads + 1) if heads % number == 0)
            raise UserError(
                f"{method} with {heads} heads on {degree} ranks. Use {' or '.join(fitting)}, or another "
                f"number of ranks (the heads divide by {divisors or 'none'})."
            )
        return choice(method, f"requested, {fitting[method][1]}")
    if degree == 1:
        return choice(ULYSSES, "one rank holds everything")
    if degree == 2:  # recipes/results/context-two-gpus-h200.json: under causal masks, of 32K and 128K tokens
        return choice(RING, "the fastest on two ranks")
    gathered = 4 * sizes.held * degree * max(1, sizes.kv_heads // 4) * sizes.head_dim * sizes.bytes_each
    possible = [name for name in (ULYSSES, ALL_GATHER, HYBRID) if name in fitting]
    if gathered > MAX_GATHERED_BYTES:
        possible.remove(ALL_GATHER)
    if not possible:
        return choice(RING, f"{heads} heads do not divide over {degree} ranks, and gathering takes {_size(gathered)}")
    return min(map(choice, possible), key=lambda one: one.traffic.total)


def gather_needed(usual: Choice, requested: str, mask: Mask, layout: Layout) -> tuple[Choice, Needed | None]:
    """Choose whether to gather only the keys that a mask makes visible, where they are few and need the least traffic.

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
    if share > MAX_FETCHED or (requested == AUTO and sent.total >= usual.traffic.total):
        return usual, None
    return Choice(ALL_GATHER, sizes, 1, sent, f"of the {share:.0%} of other ranks' keys that are seen"), needed


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
