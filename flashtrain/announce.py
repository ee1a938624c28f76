"""Print a run's lines on standard output, and silence the chatter of its libraries."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only

log = logging.getLogger("flashtrain")

# Warnings of Lightning's about its own internals, or about what flashtrain does on purpose.
SILENCED = (
    ".*LeafSpec.*",
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*Total length of .* across ranks is zero.*",  # no validation data
    # Labels that a mask shows.
    ".*have overridden `on_before_batch_transfer` in `LightningModule`.*",
    ".*broadcast_buffers.*deprecated.*",
    ".*barrier.. using the device under current context.*",
    ".*(rank|alpha)_pattern keys did not match.*",  # peft 0.21 of experts, which they do match
)

_quiet = False


@rank_zero_only
def say(line: str, level: int = logging.INFO) -> None:
    """Print a line on the first rank, through the `flashtrain` logger, which your program
    may redirect or silence.

    Args:
        line: the text.
        level: logging.WARNING for a line that a quiet notebook prints too.
    """
    if not log.handlers and not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log.log(level, line)


def is_quiet() -> bool:
    """Return whether `quietly` has switched off progress bars and tables."""
    return _quiet


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Within a `with` block, let is_quiet() return `quiet`: True switches progress bars
    and printed tables off."""
    global _quiet
    before, _quiet = _quiet, quiet
    try:
        yield
    finally:
        _quiet = before


def is_first_rank() -> bool:
    """Return whether this process is the only one, or rank 0, which writes shared files."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def quieten() -> None:
    """Silence Lightning's greetings, warnings listed in SILENCED, and the kernels' lines on
    every rank but the first.

    Called where flashtrain runs a whole job, not when a program imports its parts.
    """
    if getattr(rank_zero_only, "rank", 0):
        logging.getLogger("flashtrain_kernels").setLevel(logging.ERROR)
    for name in (
        "pytorch_lightning",
        "lightning_fabric",
        "lightning.pytorch",
        "pytorch_lightning.utilities.rank_zero",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers imports torchao if it is installed, and the import reports which of its GPU
    # libraries do not load. What is slow flashtrain says itself, with the extra that it needs.
    for name in ("torchao", "torch.utils._pytree", "transformers.integrations.hub_kernels"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in SILENCED:
        warnings.filterwarnings("ignore", message=pattern)
