"""What the tests of whole runs share: a small text, the tiny configuration, and one run of it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tiny_runs import TINY, TinyRuns, made_once

# Each core runs a process of tests: more threads in each would only get in each other's way.
# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# nohup starts the tests with SIGHUP ignored, a script's `&` with SIGINT: tests send both, to
# themselves and to processes, which inherit what is ignored.
if os.name != "nt" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example has a time to be ready in, nor has drawing them: how fast and how busy the
# machine is tells nothing.
settings.register_profile("flashtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flashtrain")

# While files are imported and tests collected nothing is thrown away: see pytest_collection_finish.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process of tests is left with it at the end."""
    items.sort(
        key=lambda item: (
            *(not item.get_closest_marker(name) for name in ("longest", "integration")),
            _mixed(item),
        )
    )


def _mixed(item: pytest.Item) -> int:
    """A place for a GPU test far from its neighbours, which want the same kernels: side by side,
    processes would all compile them, and later they are in Triton's cache. It also keeps apart
    those that fill the GPU's memory."""
    return zlib.crc32(item.nodeid.encode()) if item.get_closest_marker("gpu") else 0


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What torch keeps of a GPU's memory is no other process's, whose tests may want most of it."""
    if item.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**32:
            torch.cuda.empty_cache()


def pytest_collection_finish() -> None:
    """Python's garbage collector looks through what every import and every test's name left, again
    and again, for a third of all the time. None of it ends before the process: it is set aside, and
    the rest is looked through less."""
    if "flashtrain.command.compose" in sys.modules:
        from quick_settings import QuickHydra

        QuickHydra().serve()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


# What Lightning's launcher sets in this process, and reads as "ranks are
# started by something else".
LAUNCHER = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """A Trainer on several ranks leaves its rank and its address in the environment: a command that
    a later test starts would wait for ranks that nobody starts."""
    before = {name: os.environ.get(name) for name in LAUNCHER}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """passing(seconds): so much time passes, by time.monotonic and
    time.perf_counter. By itself none does."""
    now = [1000.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the caches of whoever runs it."""
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache-home"))
    return tmp_path / "cache-home"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten small documents that a byte model can learn something of."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(10):
        line = f"document {number} says that the quick brown fox jumps over the lazy dog. "
        (folder / f"{number}.txt").write_text(line * 20)
    return folder


@pytest.fixture(scope="session")
def tiny_runs(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("runs")
    cache = tmp_path_factory.mktemp("cache")
    return TinyRuns(
        folder, [*TINY, f"data.path={text_folder}", f"data.cache_dir={cache}", f"output={folder}"]
    )


@pytest.fixture(scope="session")
def trained(tiny_runs: TinyRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished tiny run."""
    return made_once(tmp_path_factory, "trained", tiny_runs.finished)
