"""`python -m flashtrain` as processes that can be killed, one for each rank, forked from
one that has imported it."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from free_port import free_port

Settings = dict[str, Any] | list[str]  # by name, or the command's words
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytorch_lightning", "flashtrain.__main__", "flashtrain.run.job"])


def words_of(settings: Settings) -> list[str]:
    """The settings as the command line has them: those whose value is a name,
    a number or a path."""
    if isinstance(settings, list):
        return settings
    return [
        f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"
        for key, value in settings.items()
    ]


def start(
    settings: Settings,
    output: Path,
    ranks: int = 1,
    temporary: Path | None = None,
    nodes: int = 1,
    slurm: bool = False,
) -> list[ForkServerProcess]:
    """The command's processes, of as many ranks on each of so many nodes as
    torchrun or SLURM would start.

    What they print is in OUTPUT/printed-RANK; temporary: TMPDIR.
    """
    world = ranks * nodes
    output.mkdir(parents=True, exist_ok=True)
    shared = {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    if temporary is not None:
        shared["TMPDIR"] = str(temporary)
    if world > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if slurm:
            shared |= {
                "SLURM_JOB_ID": "77",
                "SLURM_JOB_NAME": "contract",
                "SLURM_NODELIST": "localhost",
            }
            del shared["MASTER_ADDR"]  # Lightning's, from the list
            shared |= {
                "SLURM_NTASKS": str(world),
                "SLURM_NTASKS_PER_NODE": str(ranks),
                "SLURM_NNODES": str(nodes),
            }
        else:
            shared |= {
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(ranks),
                "TORCHELASTIC_RUN_ID": "contract",
            }
    processes = []
    names = (
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
        if slurm
        else ("RANK", "LOCAL_RANK", "GROUP_RANK")
    )
    for rank in range(world):
        numbers = (str(rank), str(rank % ranks), str(rank // ranks))
        own = dict(zip(names, numbers, strict=True)) if world > 1 else {}
        process = _FORKS.Process(
            target=_command,
            args=(words_of(settings), {**shared, **own}, output / f"printed-{rank}"),
        )
        process.start()
        processes.append(process)
    return processes


def end(processes: list[ForkServerProcess]) -> list[int | None]:
    """Their exit statuses, a signal's as -N, once all have ended."""
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run(settings: Settings, output: Path, ranks: int = 1) -> None:
    """The command, which must end well."""
    statuses = end(start(settings, output, ranks))
    assert statuses == [0] * ranks, (output / "printed-0").read_text()


def _command(words: list[str], environment: dict[str, str], printed: Path) -> None:
    os.environ.update(environment)
    with printed.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    import flashtrain.__main__ as command

    torch.set_num_threads(1)
    command.STARTED = time.monotonic()
    sys.modules["__main__"] = command
    sys.argv = ["flashtrain", *words]
    command.main()
