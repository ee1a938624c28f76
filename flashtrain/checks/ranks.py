"""Whether two processes that share a row compute the loss that one does."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from flashtrain.checks.check import NONE, Row, Subject, relative, row
from flashtrain.checks.packed import Batch, Packed
from flashtrain.distributed.context.batch import LABELS, shard_batch
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.errors import first_line
from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain_kernels.loss_head import IGNORED

Shard = Callable[[Batch, int, int], Batch]


def equals_two(subject: Subject, packed: Packed, ranks: int, shard: Shard | None) -> Row:
    """Return whether the loss is the same if `ranks` processes on this CPU share the batch's rows;
    for `shard` see flashtrain.check."""
    title = f"one rank equals {ranks}"
    if next(subject.model.parameters()).is_cuda or dist.is_initialized():
        return Row(title, NONE, None, "it is asked on a CPU, of a program of one process")
    # Forked, as a DataLoader's workers are: a model of a notebook has no module to import.
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        given = (ranks, folder, subject, packed, shard)
        started = [context.Process(target=_rank, args=(one, *given)) for one in range(ranks)]
        for one in started:
            one.start()
        for one in started:
            one.join()
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        found = [json.loads(one.read_text()) if one.exists() else "it ended" for one in files]
    refused = next((one for one in found if isinstance(one, str)), None)
    if refused is not None:
        return Row(title, NONE, None, refused)
    figure = relative(subject.loss(packed.batch), torch.tensor(found[0]))
    return row(title, figure, subject.rounding, "their loss is another one")


def _rank(
    rank: int, ranks: int, folder: str, subject: Subject, packed: Packed, shard: Shard | None
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        found: Any = _shared_loss(rank, ranks, subject, packed.batch, shard)
    except Exception as error:  # noqa: BLE001 - the first process reports it
        found = first_line(error)
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def _shared_loss(
    rank: int, ranks: int, subject: Subject, batch: Batch, shard: Shard | None
) -> float:
    if shard is None:
        part, sequence = shard_batch(batch, ContextGroup())
        with use_sharded_sequence(sequence):
            loss = subject.loss(part)
        both = torch.stack((loss if sequence.is_weighted else loss * sequence.weight, loss * 0 + 1))
    else:
        part = shard(batch, rank, ranks)
        labels = (part[LABELS] != IGNORED).sum()
        both = torch.stack((subject.loss(part) * labels, labels.double()))
    dist.all_reduce(both)
    return float(both[0] / both[1])
