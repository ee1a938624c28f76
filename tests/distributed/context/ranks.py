"""Starting gloo ranks for a test: each runs a script of this folder as torchrun would, and writes what it found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def environment(ranks: int, gpus: bool = False) -> dict[str, str]:
    """The variables that all ranks share. gpus: whether they may see any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", HERE))),
        "OMP_NUM_THREADS": "1",
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }


def start(script: str, ranks: int, *arguments: Any, gpus: bool = False, **variables: str) -> list[subprocess.Popen]:
    """The processes of all ranks."""
    shared = {**environment(ranks, gpus), **variables}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 240) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the ranks; none is left running."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs
