"""What a run tells its user: one plain line at a time, from the first rank only."""

from __future__ import annotations

import logging
import sys

from pytorch_lightning.utilities.rank_zero import rank_zero_only

log = logging.getLogger("flashtrain")


@rank_zero_only
def say(line: str) -> None:
    """Print a line through the `flashtrain` logger, which a program of your own may redirect or silence."""
    if not log.handlers and not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log.info(line)
