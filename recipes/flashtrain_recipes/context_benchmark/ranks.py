"""What a rank of the benchmark is: its device, and those that share the sequences with it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashtrain.distributed.context.exchange import ContextGroup

_STUCK = timedelta(minutes=10)  # after which a rank that waits for the others fails


class Team:
    """All ranks of the job, which share each sequence, as one of them sees them.

    group: for attention, over NCCL on GPUs; numbers and words go over gloo.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.group = ContextGroup()
        self.rank, self.size = self.group.rank, self.group.size
        self._control = dist.new_group(backend="gloo", timeout=_STUCK)
        self._token = torch.zeros(1, device=device)
        self.meet()  # communicators are made at their first use, and not within something that is timed

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def meet(self) -> None:
        """A barrier: for the device's queue, and on a CPU for the processes."""
        dist.all_reduce(self._token)


def begin(rank: int, size: int, kind: str, *, local_rank: int, init_method: str) -> Team:
    """Join the process group of all ranks, NCCL on GPUs and gloo on CPUs.

    On a CPU a rank has its share of the cores, also where it stands for one device.
    """
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=_STUCK)
    return Team(torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu"))
