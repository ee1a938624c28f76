"""Whether processes that share a row compute the loss that one does."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashtrain.checks.packed import Packed
from flashtrain.checks.questions import NONE, Row, compared, loss_of
from flashtrain.distributed.context.batch import LABELS, shard_batch
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.errors import first_line
from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain.models.trainable import inner
from flashtrain.settings.text import SequenceSharding
from flashtrain.tasks.context_run import check_model
from flashtrain.tasks.language.task import LanguageModel
from flashtrain_kernels.loss_head import IGNORED


def equals_ranks(model: nn.Module, packed: Packed, ranks: int, shard: Any) -> Row:
    """Return whether `ranks` processes compute the same loss; for `shard` see flashtrain.check."""
    title = f"one rank equals {ranks}"
    if next(model.parameters()).is_cuda or dist.is_initialized():
        return Row(title, NONE, "it is asked in one process, on a CPU")
    if shard is None and isinstance(model, LanguageModel):
        own, name = model.model, type(inner(model.model)).__name__
        how = SequenceSharding(0, ranks, "auto", "balanced", groups="fixed", devices=ranks)
        try:  # what a training refuses to share is not asked
            check_model(how, own, name)
        except ValueError as error:
            return Row(title, NONE, first_line(error))
    # Forked, as a DataLoader's workers are: a model of a notebook has no module to import.
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        given = (ranks, Path(folder), model, packed, shard)
        started = [context.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
        for one in started:
            one.start()
        for one in started:
            one.join()
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        found = [json.loads(one.read_text()) for one in files if one.exists()]
    if failures := [one for one in found if isinstance(one, str)]:
        return Row(title, NONE, failures[0])
    if len(found) < ranks:
        return Row(title, NONE, "a process ended without a result")
    losses = loss_of(model, packed.batch), torch.tensor(found[0])
    return compared(title, *losses, packed.rounding, "their loss is another one")


def _rank(
    rank: int, ranks: int, folder: Path, model: nn.Module, packed: Packed, shard: Any
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found: Any
    try:
        if shard is None:
            part, sequence = shard_batch(packed.batch, ContextGroup())
            with use_sharded_sequence(sequence):
                loss, weight = loss_of(model, part), torch.ones(())
            loss = loss if sequence.is_weighted else loss * sequence.weight
        else:
            part = shard(packed.batch, rank, ranks)
            weight = (part[LABELS] != IGNORED).sum()
            loss = loss_of(model, part) * weight
        both = torch.stack((loss, weight.double()))
        dist.all_reduce(both)
        found = float(both[0] / both[1])
    except Exception as error:  # noqa: BLE001 - the first process reports it
        found = first_line(error)
    (folder / str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()
