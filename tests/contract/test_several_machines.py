"""Two nodes of two processes: the losses of one process; a node that dies ends the job, and
resume=auto continues it.

A node is what torchrun or SLURM tells its processes, or a torchrun of its own.
Both are on this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from contract_runs import Settings, language, last_step, logged, summary
from forked_commands import end, run, start, words_of
from free_port import free_port
from tiny_runs import checkout_environment, wait_for

from flashtrain.errors import UserError
from flashtrain.run.fitting import SameCheckpoint

pytestmark = pytest.mark.integration  # whole runs, in processes

NODES: Settings = {"trainer.devices": 2, "trainer.nodes": 2}
CASES: dict[str, Settings] = {
    "ddp": {"trainer.strategy": "ddp"},
    "fsdp": {"trainer.strategy": "fsdp"},
    # The model has 4 heads.
    "hybrid": {"context_parallel": 4, "trainer.context_parallel_method": "hybrid"},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("text")
    own = {"model.dropout": 0, "trainer.micro_batch": 2, "data.cache_dir": place}
    # 4 samples: what does not divide is left out.
    return {**language(place), **own, "data.validation_tokens": 128}


@pytest.fixture(scope="module")
def alone(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("alone")
    run({**settings, "hydra.run.dir": place / "run"}, place)
    return place / "run"


@pytest.mark.parametrize(
    ("case", "slurm"), [("ddp", False), ("ddp", True), ("fsdp", False), ("hybrid", False)]
)
def test_two_nodes_have_the_losses_of_one_process(
    case: str, slurm: bool, settings, alone: Path, tmp_path
) -> None:
    where = (
        {"output": tmp_path / "runs"}
        if slurm
        else {"hydra.run.dir": tmp_path / "runs" / "gpt2" / "run"}
    )
    processes = start(
        {**settings, **NODES, **CASES[case], **where}, tmp_path, ranks=2, nodes=2, slurm=slurm
    )
    assert end(processes) == [0] * 4, (tmp_path / "printed-0").read_text()
    (folder,) = (tmp_path / "runs" / "gpt2").iterdir()  # one for all
    mine, theirs = logged(folder), logged(alone)
    assert mine.keys() == theirs.keys()
    for step, row in theirs.items():
        for name in {"train_loss", "validation_loss"} & row.keys():
            assert mine[step][name] == pytest.approx(row[name], rel=1e-5), (step, name)
    assert summary(folder)["devices"] == 4
    assert not list(folder.glob("flashtrain-rank-*.log"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes as Linux has them")
def test_a_node_that_dies_ends_the_other_and_resume_auto_continues(
    settings: Settings, tmp_path: Path
) -> None:
    often = {
        "trainer.steps": 5000,
        "trainer.checkpoint_every": 2,
        "trainer.validate_every": 5000,
        **NODES,
    }
    words = {**settings, **often, "trainer.strategy": "ddp", "output": tmp_path}
    address = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    agents = []
    for node in range(2):
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=2",
            *address,
        ]
        with (tmp_path / f"node-{node}").open("w") as printed:
            agents.append(
                subprocess.Popen(
                    [*torchrun, f"--node-rank={node}", "-m", "flashtrain", *words_of(words)],
                    env={**checkout_environment(), "OMP_NUM_THREADS": "1"}, stdout=printed,
                    stderr=printed,
                )
            )  # fmt: skip
    assert wait_for(
        lambda: list(tmp_path.glob("gpt2/*/checkpoints/last.ckpt")) or agents[0].poll() is not None
    )
    ranks = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    for process in (agents[1].pid, *map(int, ranks)):
        os.kill(process, signal.SIGKILL)
    assert [agent.wait() for agent in agents] == [1, -signal.SIGKILL]
    printed = (tmp_path / "node-0").read_text()
    assert "the connection to a process on 127.0.0.1 broke" in printed, printed
    assert "resume=auto" in printed
    (folder,) = (tmp_path / "gpt2").iterdir()
    assert summary(folder)["status"] == "failed"
    died = last_step(folder)
    assert died >= 2
    again = {**words, "trainer.max_minutes": 1e-6, "resume": "auto"}
    assert end(start(again, tmp_path / "again", ranks=2, nodes=2, slurm=True)) == [0] * 4
    assert [path.name for path in (tmp_path / "gpt2").iterdir()] == [folder.name]
    assert last_step(folder) == died + 1


def test_a_machine_without_the_checkpoint_does_not_begin_anew_beside_one_that_resumes(
    tmp_path: Path,
) -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda _: tmp_path / "last.ckpt"))
    SameCheckpoint(tmp_path / "last.ckpt").setup(trainer, None, "fit")
    with pytest.raises(UserError, match=r"has no such checkpoint.*output="):
        SameCheckpoint(None).setup(trainer, None, "fit")
