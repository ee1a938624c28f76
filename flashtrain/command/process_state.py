"""Save and restore the state of a program that calls the command: its logging, and Hydra's and
torch's state."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hydra.core.global_hydra import GlobalHydra

from flashtrain import announce


@contextmanager
def preserve_process_state(*, quiet: bool) -> Iterator[None]:
    """Context manager to run the command inside another program: at its end it restores Hydra, the
    logger and torch's determinism, and destroys process groups that the command made.

    Args:
        quiet: print warnings only, and draw no progress bars.
    """
    log = announce.log
    propagates = log.propagate
    had_ranks = torch.distributed.is_initialized()
    of_caller = GlobalHydra.instance().hydra
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    GlobalHydra.instance().clear()
    log.propagate = propagates and not quiet  # to handlers that notebooks come with
    log.setLevel(log.level or logging.INFO)  # for the run's own log file
    handler = logging.StreamHandler(sys.stderr if quiet else sys.stdout)
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    if not log.handlers and (quiet or not logging.getLogger().handlers):
        log.addHandler(handler)
    try:
        with announce.quietly(quiet):
            yield
    except SystemExit as end:
        # Lightning's Trainer makes the one of the other.
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
        GlobalHydra.instance().hydra = of_caller
        # trainer.deterministic changes it.
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if torch.distributed.is_initialized() and not had_ranks:
            torch.distributed.destroy_process_group()
