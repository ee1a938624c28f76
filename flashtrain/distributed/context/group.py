"""The ranks that share a sequence, and how they are divided into those that share heads and those that form rings.

R ranks (the degree), U of them dividing the heads (neighbours, which sit on one host), R / U rings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from flashtrain.errors import UserError


class ContextGroup:
    """One process group whose ranks hold a sequence together; and, made when asked for, its parts.

    group: a torch.distributed process group (None: all ranks). Rank r = ring * U + place: the U ranks of one `ring`
    index divide the heads among them, the R / U ranks of one `place` pass keys and values around.
    parts: {U: (heads, ring)} made beforehand: for a job in which not every rank has made as many process groups, since
    torch names those of some ranks alone by that number.
    """

    def __init__(self, group: Any = None, parts: Mapping[int, tuple[Any, Any]] | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self._parts: dict[int, tuple[Any, Any]] = dict(parts or {})

    def parts(self, heads_degree: int) -> tuple[Any, Any]:
        """(the group that divides the heads, the group that forms a ring) of this rank, for U = heads_degree.

        Where new groups are needed, every rank of the job must ask at the same point (NCCL may split the communicator
        of all of them). UserError: U does not divide R.
        """
        if heads_degree < 1 or self.size % heads_degree:
            raise UserError(
                f"heads divided over {heads_degree} of {self.size} ranks. Possible: a number that divides {self.size}."
            )
        if heads_degree not in self._parts:
            self._parts[heads_degree] = self._split(heads_degree)
        return self._parts[heads_degree]

    def _split(self, heads_degree: int) -> tuple[Any, Any]:
        if heads_degree == self.size:
            return self.group, None
        if heads_degree == 1:
            return None, self.group
        ring, place = divmod(self.rank, heads_degree)
        heads = [self.ranks[ring * heads_degree + other] for other in range(heads_degree)]
        around = [self.ranks[other * heads_degree + place] for other in range(self.size // heads_degree)]
        # Each rank names its own two groups only; it need not know those of other context groups.
        return tuple(dist.new_group(ranks, use_local_synchronization=True) for ranks in (heads, around))
