"""What a run says on standard output, and what the libraries below it would say and nobody has a use for."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only

log = logging.getLogger("flashtrain")

_quiet = False


@rank_zero_only
def say(line: str, level: int = logging.INFO) -> None:
    """Print a line through the `flashtrain` logger, which a program of your own may redirect or silence.

    level: logging.WARNING for what is printed in a quiet notebook too.
    """
    if not log.handlers and not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log.log(level, line)


def is_quiet() -> bool:
    """Whether no progress is to be drawn, on any stream: see `quietly`."""
    return _quiet


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Meanwhile is_quiet() says so."""
    global _quiet
    before, _quiet = _quiet, quiet
    try:
        yield
    finally:
        _quiet = before


def is_first_rank() -> bool:
    """Whether this process is the only one, or the first of those that train together: it writes what all share."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


# Warnings of Lightning's about its own insides, or about what flashtrain does on purpose.
IGNORED = (
    ".*LeafSpec.*",
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*Total length of .* across ranks is zero.*",  # nothing is held out
    ".*have overridden `on_before_batch_transfer` in `LightningModule`.*",  # labels that a mask shows
    ".*barrier.. using the device under current context.*",
)


def quieten() -> None:
    """Silence Lightning's greetings, the warnings listed above, and what the kernels tell on every rank but the first.
    For the command, not for the library."""
    if getattr(rank_zero_only, "rank", 0):
        logging.getLogger("flashtrain_kernels").setLevel(logging.ERROR)
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # torchao's import, which transformers makes wherever it is installed, tells which of its GPU libraries do not load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in IGNORED:
        warnings.filterwarnings("ignore", message=pattern)
