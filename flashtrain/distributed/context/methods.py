"""The context-parallel methods, and the automatic choice among them.

ulysses      every rank computes all tokens for some heads
all-gather   every rank computes its tokens against all keys, gathered some heads at a time; under masks such as
             packed documents only the keys that it sees
ring         keys and values go from rank to rank, partial results are merged: the least memory
hybrid       heads divided over some ranks, rings over the rest: 12 heads on 8 ranks as 4 x 2
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
    """A method and why it was chosen.

    Attributes:
        method: its name.
        sizes: the sizes of the attention.
        heads_degree: the ranks that divide the heads.
        traffic: what the busiest rank sends for a layer.
        why: the reason, in words.
    """

    method: str
    sizes: Sizes
    heads_degree: int
    traffic: Traffic
    why: str

    @property
    def reason(self) -> str:
        """The method, why, and its traffic, in one line."""
        return f"{self.method}: {self.why}, {_size(self.traffic.total)} a rank, layer and step"


def choose_method(method: str, sizes: Sizes) -> Choice:
    """The named method, or for "auto" the one with the least traffic (on two ranks the ring, the fastest measured).

    Args:
        method: the method's name, or "auto".
        sizes: the sizes of the attention.

    Raises:
        UserError: the method does not fit the heads.
    """
    heads, degree = sizes.heads, sizes.degree
    shared = math.gcd(heads, degree)
    fitting = {ALL_GATHER: (1, f"on {degree} ranks"), RING: (1, f"on {degree} ranks")}
    if shared == degree:
        fitting[ULYSSES] = degree, f"{heads} heads over {degree} ranks"
    elif shared > 1:
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
    """Choose again for one mask: gather only the keys that are seen, if these are few and it sends the least.

    The choice is the same on every rank.

    Args:
        usual: the choice for any mask.
        requested: the requested method, or "auto".
        mask: the mask of the whole sequence.
        layout: which rank holds which tokens.

    Returns:
        (the choice, the keys to gather; None unless only these are gathered).
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
