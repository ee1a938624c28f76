"""The ranks that share a sequence, and their division into ranks that share heads and rings.

R ranks share a sequence; U neighbouring ranks, which sit on one host, divide the heads; R
/ U ranks form a ring.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashtrain.distributed.context.traffic import near_ranks


class ContextGroup:
    """The process group whose ranks share a sequence, and its subgroups, which are
    made when first needed.

    Rank r = ring * U + place: the U ranks with the same `ring` divide the heads among them, the R /
    U ranks with the same `place` form a ring, in which keys and values go from rank to rank.

    Args:
        group: a torch.distributed process group; None: all ranks.
        data_group: the process group over which labels are summed, of ranks that hold other
            samples; None: no others.
        device: the device of the small tensors that the ranks compare or sum.
        near: the number of neighboring ranks that are on one machine; 1: it does not matter.
        planned: whether ranks also share documents in blocks (`block`), which are made now. Heads
            are not divided further then.
    """

    def __init__(
        self,
        group: Any = None,
        data_group: Any = None,
        device: torch.device | str = "cpu",
        near: int = 1,
        planned: bool = False,
    ) -> None:
        self.data_group, self.device, self.near = data_group, device, near
        self.group = dist.group.WORLD if group is None else group
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.planned = planned
        self._parts: dict[int, tuple[Any, Any]] = {}
        self._blocks = {self.size: self}
        for size in block_sizes(self.size)[:-1] if planned else ():
            self._blocks[size] = self._block(size)

    def block(self, size: int) -> ContextGroup:
        """Return the group of this rank and its neighbors in a block of `size` ranks, one of
        block_sizes."""
        return self._blocks[size]

    def _block(self, size: int) -> ContextGroup:
        # All ranks of the job make theirs of this size at the same point, as in `parts`.
        first = self.rank // size * size
        made = dist.new_group(self.ranks[first : first + size], use_local_synchronization=True)
        near = 1 if self.near == 1 else near_ranks(size, self.near)
        block = ContextGroup(made, None, self.device, near)
        block.planned = True
        return block

    def parts(self, heads_degree: int) -> tuple[Any, Any]:
        """Return this rank's two subgroups for U = heads_degree, a divisor of R; make
        them on the first call.

        Every rank of the job must make its first call with a new heads_degree at the same point
        (NCCL may split the communicator of all of them).

        Returns:
            (the group that divides the heads, the group that forms a ring); None
            for a group of one rank.
        """
        if heads_degree == self.size:
            return self.group, None
        if heads_degree == 1:
            return None, self.group
        if heads_degree in self._parts:
            return self._parts[heads_degree]
        ring, place = divmod(self.rank, heads_degree)
        heads = [self.ranks[ring * heads_degree + other] for other in range(heads_degree)]
        around = [
            self.ranks[other * heads_degree + place] for other in range(self.size // heads_degree)
        ]
        # Each rank names its own two groups only; it need not know those of other context groups.
        parts = tuple(
            dist.new_group(ranks, use_local_synchronization=True) for ranks in (heads, around)
        )
        return self._parts.setdefault(heads_degree, parts)


def block_sizes(ranks: int) -> list[int]:
    """Return the numbers of ranks that may share a document, ascending from 1 to `ranks`, each a
    divisor of the next: 1, 2, 4, 8 of 8. A block of ranks begins at a multiple of its size."""
    sizes = [1]
    while sizes[-1] < ranks:
        left = ranks // sizes[-1]
        sizes.append(sizes[-1] * next(n for n in range(2, left + 1) if left % n == 0))
    return sizes
