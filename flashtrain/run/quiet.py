"""What the libraries below would print into a run's output and a user of the command has no use for."""

from __future__ import annotations

import logging
import warnings

# Warnings of Lightning's about its own insides, or about what flashtrain does on purpose.
IGNORED = (
    ".*LeafSpec.*",
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*Total length of .* across ranks is zero.*",  # nothing is held out
    ".*barrier.. using the device under current context.*",
)


def quieten() -> None:
    """Silence Lightning's greetings and the warnings listed above. For the command, not for the library."""
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in IGNORED:
        warnings.filterwarnings("ignore", message=pattern)
