"""A rank that was killed is named before the job is."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from tiny_runs import TinyRuns, checkout_environment
from torch.distributed import DistNetworkError, TCPStore

from flashtrain.announce import quieten
from flashtrain.errors import RunFailed
from flashtrain.folders.run_folder import read_summary
from flashtrain.run.fitting import naming_killed_ranks
from flashtrain.training.killed_ranks import killed_rank, lost_connection, name_killed_ranks


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    # To put back.
    monkeypatch.setattr(
        _ChildProcessObserver, "_terminate_all", _ChildProcessObserver._terminate_all
    )


def observe(monkeypatch: pytest.MonkeyPatch, *codes: str) -> None:
    """What Lightning's observer does once processes with these codes have ended."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", f"import os, signal; {code}"]) for code in codes
    ]
    for rank in ranks:
        rank.wait()
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    assert _ChildProcessObserver(main_pid=0, child_processes=ranks)._run()
    assert statuses == [RunFailed.status]


def test_a_killed_rank_is_named_and_noted(capsys, monkeypatch) -> None:
    noted: list[str] = []
    quieten()
    name_killed_ranks(print)
    name_killed_ranks(noted.append)
    observe(monkeypatch, "pass", "os.kill(os.getpid(), signal.SIGKILL)")
    line = "rank 2 was killed by SIGKILL (often: out of host memory)"
    assert capsys.readouterr().err == f"flashtrain: {line}. The job ends.\n"
    assert noted == [line]


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(2)"])
def test_the_first_rank_ends_with_one_status_and_takes_the_others_along(code: str) -> None:
    """However a rank has ended, and whatever the first one waits for."""
    read, write = os.pipe()  # open at its other end as long as a rank lives

    def first() -> None:
        codes = ("time.sleep(600)", code)
        words = [[sys.executable, "-c", f"import os, signal, time; {one}"] for one in codes]
        ranks = [subprocess.Popen(one, pass_fds=[write]) for one in words]
        ranks[1].wait()
        name_killed_ranks(print)
        _ChildProcessObserver(os.getpid(), ranks)._run()

    process = ForkProcess(target=first)
    process.start()
    os.close(write)
    process.join(300)
    assert process.exitcode == RunFailed.status
    assert os.read(read, 1) == b""


SCRIPT = """
import os, signal
import pytorch_lightning as pl
import flashtrain


class Kill(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


flashtrain.register("callback", "kill")(lambda settings: Kill())
if __name__ == "__main__":
    flashtrain.main()
"""


@pytest.mark.integration  # starts ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "context_parallel"])
def test_a_killed_rank_ends_every_strategy_alike(
    strategy: str, tiny_runs: TinyRuns, tmp_path: Path
) -> None:
    script = tmp_path / "killing.py"
    script.write_text(SCRIPT)
    own = (
        "trainer.devices=2",
        f"trainer.strategy={strategy}",
        "trainer.callbacks=[kill]",
        f"output={tmp_path}",
    )
    command = [sys.executable, str(script), *tiny_runs.settings_words(*own)]
    environment = {**checkout_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == RunFailed.status, done.stdout + done.stderr
    assert "rank 1 was killed by SIGKILL (often: out of host memory). The job ends." in done.stderr
    (folder,) = (tmp_path / "gpt2").iterdir()
    assert read_summary(folder)["error"].startswith("rank 1 was killed by SIGKILL")


def test_a_rank_that_ended_by_itself_has_reported_why(capsys, monkeypatch) -> None:
    noted: list[str] = []
    name_killed_ranks(noted.append)
    observe(monkeypatch, "raise SystemExit(75)")
    assert capsys.readouterr().err == ""
    assert noted == []


def test_who_lost_a_peer_names_the_rank_that_was_killed() -> None:
    codes = ("time.sleep(3600)", "time.sleep(0.2); os.kill(os.getpid(), signal.SIGSEGV)")
    ranks = [
        subprocess.Popen([sys.executable, "-c", f"import os, signal, time; {code}"])
        for code in codes
    ]
    try:
        assert killed_rank(ranks, seconds=600) == "rank 2 was killed by SIGSEGV"
    finally:
        ranks[0].kill()
        ranks[0].wait()


@pytest.mark.parametrize(
    ("code", "error", "raised", "words"),
    [
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            RuntimeError("reset by peer"),
            RunFailed,
            r"rank 1 was killed by SIGTERM",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            RuntimeError("CUDA out of memory"),
            RuntimeError,
            "out of memory",
        ),
        ("raise SystemExit(2)", RuntimeError("reset by peer"), RuntimeError, "reset by peer"),
        (
            "raise SystemExit(2)",  # or another machine's, of which this process knows nothing
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:17290. GLHF!"
            ),
            RunFailed,
            r"process on 10\.0\.0\.2 broke: .*resume=auto",
        ),
    ],
)
def test_what_fails_beside_a_killed_rank_names_it_in_validation_too(
    code, error, raised, words
) -> None:
    rank = subprocess.Popen([sys.executable, "-c", f"import os, signal; {code}"])
    rank.wait()
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=[rank])))
    with pytest.raises(raised, match=words), naming_killed_ranks(trainer):
        raise error


def test_a_port_that_another_process_uses_is_named(monkeypatch) -> None:
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(other.port))
    with pytest.raises(DistNetworkError) as refused:
        TCPStore("127.0.0.1", other.port, is_master=True, wait_for_workers=False)
    line = f"MASTER_PORT={other.port} is in use by another process here: set another one"
    assert lost_connection(refused.value) == line
