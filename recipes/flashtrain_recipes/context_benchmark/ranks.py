"""A rank of the benchmark: its device, and its process group of all ranks that compute
a sequence together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.transfers import exchange_first

_STUCK = timedelta(minutes=10)  # after which a rank that waits for the others fails


class Team:
    """All ranks that compute a sequence together, as one of them sees them. Making it
    joins the process group.

    Attributes:
        device: this rank's device.
        rank, size: this rank's number, and how many ranks there are.
        group: sends attention's tensors, over NCCL on GPUs and gloo on CPUs.
        planned: the same for documents that are planned over blocks of ranks.
    """

    def __init__(self, rank: int, size: int, kind: str, meeting: str) -> None:
        """Join the other ranks.

        Args:
            kind: "cuda" or "cpu"; on a CPU each rank uses its share of the cores.
            meeting: the URI of a file that does not exist yet, by which the ranks find each other.
        """
        self.rank, self.size = rank, size
        if kind == "cuda":
            torch.cuda.set_device(rank)
            exchange_first()
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // size))
        self.device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=meeting, rank=rank, world_size=size, timeout=_STUCK
        )
        self.group = ContextGroup()
        self.planned = ContextGroup(planned=True)
        self._control = dist.new_group(backend="gloo", timeout=_STUCK)  # for numbers and words
        self._token = torch.zeros(1, device=self.device)
        # Communicators are made at their first use, and not within something that is timed.
        self.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. Every rank must call it."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def barrier(self) -> None:
        """Wait for the other ranks (on a GPU its later kernels wait, not the host).
        Every rank must call this."""
        dist.all_reduce(self._token)
