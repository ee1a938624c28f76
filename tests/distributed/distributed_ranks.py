"""Gloo ranks of the tests in this folder, started once a session: their imports take longer than what they do, so that
one process has them done and forks the ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from ranks import process_environment, run_script
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

HERE = Path(__file__).parent


def launch_once(script: str, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Run a script of this folder that forks ranks, for whichever worker of the session comes first. Where it wrote."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / script.removesuffix(".py")
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        printed = folder / "printed"
        if not printed.is_file():
            paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent / "training")])
            paths = os.pathsep.join([paths, process_environment()["PYTHONPATH"]])
            code, said = run_script(str(HERE / script), folder, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="")
            printed.write_text(f"{said}\nended with {code}")
    assert printed.read_text().endswith("ended with 0"), printed.read_text()[-6000:]
    return folder


def full_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's unsharded weights on the CPU, on rank 0. Every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(module, options=options))


def of_ranks(folder: Path, count: int) -> list[Any]:
    """What each of so many ranks wrote into a folder, after all of them ended well."""
    files = [folder / f"{rank}.json" for rank in range(count)]
    said = "\n\n".join(path.read_text() for path in folder.glob("*.out"))
    assert all(file.is_file() for file in files), said[-6000:]
    assert json.loads((folder / "codes.json").read_text()) == [0] * count, said[-6000:]
    return [json.loads(file.read_text()) for file in files]
