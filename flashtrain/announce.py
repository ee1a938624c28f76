"""What a run tells its user: one plain line at a time, from the first rank only."""

from __future__ import annotations

import logging
import sys

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from flashtrain.errors import printable

log = logging.getLogger("flashtrain")


@rank_zero_only
def say(line: str) -> None:
    """Print a line through the `flashtrain` logger, which a program of your own may redirect or silence.

    What files and models wrote may be in it: a terminal obeys none of its control characters.
    """
    if not log.handlers and not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log.info(printable(line))


def is_first_rank() -> bool:
    """Whether this process is the only one, or the first of those that train together: it writes what all share."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
