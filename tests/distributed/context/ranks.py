"""Starting the ranks of a job as torchrun would, each a process."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def job(ranks: int) -> dict[str, str]:
    """The variables that all ranks of a job share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }


def process_environment() -> dict[str, str]:
    """Of a script in this folder that finds the packages of the checkout."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "recipes", ROOT / "kernels", HERE)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def run_script(script: str, *arguments: Any, **variables: str) -> tuple[int, str]:
    """The exit code and the output of one process."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    environment = {**process_environment(), **variables}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def fork(ranks: int, function: Callable[..., None], folder: Path, *arguments: Any) -> list[int]:
    """Run function(folder, *arguments) in so many ranks, forked from this process; their exit codes.

    Importing takes each rank longer than its work: the forked ones have it done. What they print is in FOLDER/RANK.out.
    """
    shared = job(ranks)
    forking = multiprocessing.get_context("fork")
    processes = [
        forking.Process(target=_rank, args=(rank, shared, function, folder, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]


def _rank(rank: int, shared: dict[str, str], function: Callable[..., None], folder: Path, arguments: tuple) -> None:
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    with (folder / f"{rank}.out").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        function(folder, *arguments)
