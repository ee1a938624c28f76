"""Gloo ranks of the tests in this folder, started once a session.

Their imports take longer than what they do: a script has them done, and forks the
ranks of each scenario.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from free_port import free_port
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Where a script finds the packages of the checkout and the modules of tests.
PATHS = (
    HERE,
    HERE / "context",
    HERE.parent,
    HERE.parent / "training",
    ROOT,
    ROOT / "recipes",
    ROOT / "kernels",
)


def launch_once(script: str, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Run a script of this folder that forks ranks, for whichever worker of the session comes
    first. Where it wrote."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / Path(script).stem
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        printed = folder / "printed"
        if not printed.is_file():
            variables = {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, str(HERE / script), str(folder)],
                env={**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            printed.write_text(f"{done.stdout}\nended with {done.returncode}")
    assert printed.read_text().endswith("ended with 0"), printed.read_text()[-6000:]
    return folder


def fork(ranks: int, function: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run function(folder, *arguments) in so many ranks, started as torchrun
    would, in a new folder.

    What they print is in FOLDER/RANK.out, their exit codes in FOLDER/codes.json.
    """
    start(ranks, function, folder, *arguments)()


def start(
    ranks: int, function: Callable[..., None], folder: Path, *arguments: Any
) -> Callable[[], None]:
    """As `fork`, without the waiting for their end: that is what it gives."""
    folder.mkdir()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    processes = [
        ForkProcess(target=_rank, args=(rank, shared, function, folder, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()

    def wait() -> None:
        for process in processes:
            process.join(600)
            if process.is_alive():
                process.kill()
                process.join()
        (folder / "codes.json").write_text(
            json.dumps([process.exitcode or 0 for process in processes])
        )

    return wait


def _rank(
    rank: int, shared: dict[str, str], function: Callable[..., None], folder: Path, arguments: tuple
) -> None:
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    with (folder / f"{rank}.out").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        function(folder, *arguments)


def report(folder: Path, found: Any) -> None:
    """Write what this rank found, for of_ranks."""
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def end() -> None:
    """Leave the process group: gloo's threads abort a process that exits with them."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def of_ranks(folder: Path, count: int) -> list[Any]:
    """What each of so many ranks reported in a folder, after all of them ended well."""
    files = [folder / f"{rank}.json" for rank in range(count)]
    said = "\n\n".join(path.read_text() for path in folder.glob("*.out"))
    assert all(file.is_file() for file in files), said[-6000:]
    assert json.loads((folder / "codes.json").read_text()) == [0] * count, said[-6000:]
    return [json.loads(file.read_text()) for file in files]


def full_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's unsharded weights on the CPU, on rank 0. Every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(module, options=options))
