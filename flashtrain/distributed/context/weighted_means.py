"""Means over a rank's labels, weighted so that their mean over the ranks is
the mean over all labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from flashtrain.distributed.context.sequence import ContextSequence


def weighted_output(sequence: ContextSequence | None, output: Any) -> Any:
    """Weight the loss that a training step returns by the rank's share of the labels, unless
    the step did so itself.

    Args:
        sequence: the step's sharded sequence; None if its batch was not sharded.
        output: a loss, a mapping with a "loss", or anything else, which is returned as it is.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if sequence is None or not isinstance(loss, Tensor) or sequence.has_weighted(loss):
        return output
    weighted = loss * sequence.weight
    return {**output, "loss": weighted} if isinstance(output, Mapping) else weighted


@contextmanager
def weighted_logs(module: pl.LightningModule, sequence: ContextSequence | None) -> Iterator[None]:
    """Within this context, weight the means over all ranks that the module logs, unless
    its step did so itself.

    Args:
        module: the module whose `log` is replaced.
        sequence: the step's sharded sequence; None if its batch was not sharded.
    """
    if sequence is None:
        yield
        return
    log = module.log

    def weighted(name: str, value: Any, *args: Any, **options: Any) -> None:
        of_all = options.get("sync_dist", False) and options.get("reduce_fx", "mean") == "mean"
        scalar = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        if of_all and scalar and not sequence.is_weighted:
            value = value * sequence.weight
        log(name, value, *args, **options)

    module.log = weighted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
