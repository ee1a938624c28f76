"""Pathfinder images made: the same image every time, in any order, chunk by chunk, by any number of processes.

A file grows in order and may be interrupted at any time. Workers are processes of their own kind instead of
multiprocessing's, which would import the program that asks (Lightning and all) into each, and runs a script without a
main guard again. Stored images are read and drawn without numba, which the walks need.

python -m flashtrain_recipes.arena.pathfinder.generate HEADER is a worker. HEADER is the JSON of records.Header. Each
line read is `first count`; the records' bytes are the answer on standard output. It ends with its input, so that it
never outlives the process that started it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.original import tables as original_tables
from flashtrain_recipes.arena.pathfinder.parameters import ORIGINAL, PathfinderParameters
from flashtrain_recipes.arena.pathfinder.records import HEADER_BYTES, Header, record_type, seal
from flashtrain_recipes.arena.pathfinder.tables import walk_tables


def stream_key(header: Header) -> int:
    """64 bits that tell one stream of images from another: by seed, split and side."""
    name = f"{header.version}/{header.seed}/{header.split}/{header.parameters.side}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def generate_records(header: Header, first: int, count: int) -> np.ndarray:
    """The records (count,) of images number `first` on. Raises UserError where no curves fit the image, or no numba."""
    try:
        from flashtrain_recipes.arena.pathfinder import walk
        from flashtrain_recipes.arena.pathfinder.original import walk as original_walk
    except ImportError as error:
        raise UserError(
            f"generating Pathfinder images needs numba, which cannot be imported here ({error}): pip install numba, "
            "or carry over a file of images made elsewhere."
        ) from error
    parameters = header.parameters
    records = np.zeros(count, dtype=record_type(parameters))
    heads = np.zeros((count, parameters.most_dashes, 2), dtype=np.int64)
    angles = np.zeros((count, parameters.most_dashes), dtype=np.uint16)
    facts = np.zeros((count, 5), dtype=np.int64)
    sizes: tuple[int, ...] = (
        parameters.side,
        parameters.seed_distance,
        parameters.contour_dashes,
        parameters.distractors,
        parameters.distractor_dashes,
    )
    key, tables = np.uint64(stream_key(header)), _tables(parameters, header.drawing)
    if header.drawing == ORIGINAL:
        original_walk.grow_images(key, first, (*sizes, parameters.padding), tables, heads, angles, facts)
    else:
        walk.grow_images(key, first, sizes, tables, heads, angles, facts)
    if not facts[:, 4].all():
        raise UserError(
            f"no two curves of {parameters.contour_dashes} dashes fit an image of side {parameters.side} after "
            f"{walk.MOST_ATTEMPTS:,} attempts: choose an easier contour, a larger side, or shorter dashes."
        )
    records["heads"], records["angles"] = heads, angles
    records["count"], records["label"], records["start"] = facts[:, 0], facts[:, 1], facts[:, 2]
    records["margin"] = np.array(parameters.margins)[facts[:, 3]]
    seal(records)
    return records


@lru_cache(maxsize=8)
def _tables(parameters: PathfinderParameters, drawing: str) -> tuple[Any, ...]:
    make = original_tables.walk_tables if drawing == ORIGINAL else walk_tables
    return tuple(make(parameters, margin) for margin in parameters.margins)


log = logging.getLogger(__name__)

CHUNK = 256  # images; at side 64, the slowest, some seconds
SECONDS_BETWEEN_LINES = 10.0


def grow_file(path: Path, header: Header, have: int, want: int, workers: int | None = None) -> None:
    """Append images number `have` to `want` - 1, after dropping whatever follows the first `have`.

    The caller holds the file's lock. Each chunk is flushed to disk before the next is written. workers: None is one a
    core. Raises UserError where no curves fit, numba is missing, or the file cannot be written.
    """
    starts = range(have, want, CHUNK)
    workers = min(workers or _cores(), len(starts))
    try:
        with path.open("r+b" if have else "wb") as file, _chunks(header, starts, want, workers) as chunks:
            if not have:
                file.write(header.to_bytes())
            file.truncate(HEADER_BYTES + have * record_type(header.parameters).itemsize)
            file.seek(0, os.SEEK_END)
            with _progress(f"generating Pathfinder-{header.parameters.side} {header.split} images", want) as advance:
                advance(have)
                for data in chunks:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    have += len(data) // record_type(header.parameters).itemsize
                    advance(have)
    except OSError as error:
        raise UserError(f"cannot write the Pathfinder images {path}: {error.strerror}.") from error


@contextmanager
def _chunks(header: Header, starts: range, end: int, workers: int) -> Iterator[Iterator[bytes]]:
    """The chunks' bytes in order, made by `workers` processes; in this process where one is enough."""
    if workers <= 1:
        yield (generate_records(header, start, min(CHUNK, end - start)).tobytes() for start in starts)
        return
    # Compiled here first, so that the workers find numba's cache instead of compiling side by side.
    generate_records(header, 0, 1)
    own = threading.local()
    started: list[subprocess.Popen[bytes]] = []

    def start_worker() -> None:
        own.process = _start_worker(header)
        started.append(own.process)

    def chunk(start: int) -> bytes:
        return _ask(own.process, header, start, min(CHUNK, end - start))

    pool = ThreadPoolExecutor(workers, initializer=start_worker)
    try:
        yield pool.map(chunk, starts)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()
            process.communicate()
        pool.shutdown()


def _start_worker(header: Header) -> subprocess.Popen[bytes]:
    import flashtrain
    import flashtrain_recipes

    roots = [str(Path(package.__path__[0]).resolve().parent) for package in (flashtrain, flashtrain_recipes)]
    path = os.pathsep.join(part for part in (*roots, os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-m", "flashtrain_recipes.arena.pathfinder.generate", json.dumps(header.as_dict())]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


def _ask(process: subprocess.Popen[bytes], header: Header, first: int, count: int) -> bytes:
    """The records of one chunk. Raises UserError with the worker's last line where it ended instead."""
    size = count * record_type(header.parameters).itemsize
    data = b""
    if process.stdin is not None and process.stdout is not None:
        try:
            process.stdin.write(f"{first} {count}\n".encode())
            process.stdin.flush()
            data = process.stdout.read(size)
        except BrokenPipeError:
            data = b""
    if len(data) < size:
        said = process.stderr.read().decode(errors="replace").strip() if process.stderr is not None else ""
        raise UserError(said.splitlines()[-1] if said else "a process that generates Pathfinder images was ended.")
    return data


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how many are done: a bar on a terminal, else a line every ten seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    last = time.monotonic()

    def advance(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            log.info("%s: %s of %s", what, f"{done:,}", f"{total:,}")

    yield advance


def main() -> int:
    """The worker; exit status 2 with one line on standard error for a UserError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the starter, which closes our input
    try:
        header = Header.from_dict(json.loads(sys.argv[1]))
        for line in sys.stdin:
            first, count = map(int, line.split())
            sys.stdout.buffer.write(generate_records(header, first, count).tobytes())
            sys.stdout.buffer.flush()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the starter is gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
