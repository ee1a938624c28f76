"""Being a guest in somebody's program or notebook: whatever a run changes of the process is afterwards as it was."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy
import torch
from hydra.core.global_hydra import GlobalHydra

from flashtrain import announce


@contextmanager
def as_a_guest(*, quiet: bool) -> Iterator[None]:
    """A run in here leaves random states, signal handlers, loggers, filters of warnings, the environment, Hydra, the
    precision of matrix products and the process groups as they were.

    quiet: what a run says is not printed, and no progress drawn; warnings are.
    """
    with ExitStack() as after:
        for restorer in (_random_states, _signals, _environment, _loggers, _hydra, _precision, _process_group):
            after.callback(restorer())
        after.enter_context(warnings.catch_warnings())
        after.enter_context(announce.quietly(quiet))
        GlobalHydra.instance().clear()  # the caller may be a Hydra program itself
        announce.log.propagate = announce.log.propagate and not quiet  # to handlers that notebooks come with
        if not announce.log.handlers and (quiet or not logging.getLogger().handlers):
            handler = logging.StreamHandler(sys.stderr if quiet else sys.stdout)
            handler.setLevel(logging.WARNING if quiet else logging.INFO)
            handler.setFormatter(logging.Formatter("%(message)s"))
            announce.log.addHandler(handler)
        if announce.log.level == logging.NOTSET:
            announce.log.setLevel(logging.INFO)  # for the run's own log file
        try:
            yield
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's Trainer makes the one of the other
                raise KeyboardInterrupt from None
            raise


def _random_states() -> Callable[[], None]:
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.cuda.set_rng_state_all(of_gpus)

    return restore


def _signals() -> Callable[[], None]:
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            if handler is not None:  # None: set by other than Python
                signal.signal(number, handler)

    return restore


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    return restore


def _loggers() -> Callable[[], None]:
    """Of every logger there is: libraries have more than those that a run silences."""
    there = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    before = [(one, one.level, list(one.handlers), one.propagate) for one in (logging.getLogger(), *there)]

    def restore() -> None:
        for one, level, handlers, propagate in before:
            one.setLevel(level)
            one.handlers[:] = handlers
            one.propagate = propagate

    return restore


def _hydra() -> Callable[[], None]:
    before = GlobalHydra.instance().hydra
    return lambda: setattr(GlobalHydra.instance(), "hydra", before)


def _precision() -> Callable[[], None]:
    before = torch.get_float32_matmul_precision()
    return lambda: torch.set_float32_matmul_precision(before)


def _process_group() -> Callable[[], None]:
    before = torch.distributed.is_initialized()

    def restore() -> None:
        if torch.distributed.is_initialized() and not before:
            torch.distributed.destroy_process_group()

    return restore
