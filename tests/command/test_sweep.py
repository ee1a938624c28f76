"""What a sweep's command line expands to, and what becomes of a job that dies without a word."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch
from tiny_runs import TinyRuns, checkout_environment

from flashtrain.command import sweep
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import write_summary
from flashtrain.folders.run_lock import LOCK
from flashtrain.settings.command_line import CommandLine
from flashtrain.training.checkpoints import read_checkpoint


def test_it_is_the_product_of_all_values_listed() -> None:
    words = ["recipe=gpt2", "seed=range(0,2)", "optimizer.betas=[0.9,0.99]", "attention=flash,sdpa"]
    jobs = sweep.expand(CommandLine(words))
    same = ("recipe=gpt2", "optimizer.betas=[0.9,0.99]")
    assert [[word for word in words if word not in same] for words in jobs] == [
        [f"seed={seed}", f"attention={attention}"]
        for seed in (0, 1)
        for attention in ("flash", "sdpa")
    ]
    with pytest.raises(UserError, match="list the values"):
        sweep.expand(CommandLine(["optimizer.learning_rate=interval(0,1)"]))


@pytest.mark.parametrize("before", [None, {"status": "running", "model": "gpt2-demo"}])
def test_a_killed_job_is_a_row_that_reports_it(tmp_path, before) -> None:
    if before:
        write_summary(tmp_path, before)
    sweep.note_failure(tmp_path, ["context=512"], -9)
    row = json.loads((tmp_path / "summary.json").read_text())
    assert (row["status"], row["error"], row["overrides"]) == (
        "failed",
        "killed by signal 9",
        "context=512",
    )


class Jobs:
    """Stands in for the jobs' processes: notes their words, and leaves the rows that
    `ends` names, a job each."""

    def __init__(self, *ends: str, stop_after: int | None = None) -> None:
        self.ends = list(ends)
        self.stop_after = stop_after
        self.words: list[list[str]] = []
        self.stopped_by: signal.Signals | None = None

    def __call__(self) -> Jobs:
        return self

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, words: list[str]) -> int:
        folder = Path(dict(word.split("=", 1) for word in words)["hydra.run.dir"].strip("'"))
        end = self.ends[len(self.words)]
        self.words.append(words)
        if end == "stopped":
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / "last.ckpt").write_bytes(b"x")
        write_summary(folder, {"status": end, "context": 32, "overrides": " ".join(words)})
        if self.stop_after == len(self.words):
            self.stopped_by = signal.SIGTERM
            return 143
        return 0 if end == "finished" else 1

    @property
    def seeds(self) -> list[str]:
        return [word for words in self.words for word in words if word.startswith("seed=")]


@pytest.fixture
def run_jobs(monkeypatch, tmp_path):
    """Runs a sweep over seed=0,1,2 whose jobs end as told. Returns (exit status, the jobs)."""

    def run(jobs: Jobs, *words: str, seeds: str = "seed=0,1,2") -> tuple[int, Jobs]:
        monkeypatch.setattr(sweep, "JobProcesses", jobs)
        line = ["recipe=gpt2", "hardware=cpu", "logger=csv"]
        return sweep.run_sweep(CommandLine([*line, f"output={tmp_path}", seeds, *words])), jobs

    return run


def sweeps(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "gpt2-sweep").iterdir())


def test_a_sweep_that_is_asked_to_end_shows_the_jobs_so_far_and_reports_how_to_go_on(
    run_jobs, tmp_path, capsys
) -> None:
    status, jobs = run_jobs(Jobs("finished", "stopped", stop_after=2))
    assert (status, jobs.seeds) == (143, ["seed=0", "seed=1"])
    (folder,) = sweeps(tmp_path)
    assert "1" in (folder / "sweep.md").read_text()
    assert f"resume={folder}" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["auto", "its folder"])
def test_resuming_a_sweep_keeps_what_is_done_goes_on_with_what_was_stopped_and_runs_the_rest(
    run_jobs, tmp_path, how
) -> None:
    run_jobs(Jobs("finished", "stopped", stop_after=2))
    (folder,) = sweeps(tmp_path)
    status, jobs = run_jobs(
        Jobs("finished", "finished"), f"resume={'auto' if how == 'auto' else folder}"
    )
    assert status == 0
    assert jobs.seeds == ["seed=1", "seed=2"]
    assert ["resume=auto" in words for words in jobs.words] == [True, False]
    assert [words[-1].strip("'").rsplit("/", 1)[1] for words in jobs.words] == ["01", "02"]
    assert sweeps(tmp_path) == [folder]


def test_what_ran_out_of_memory_is_a_result_and_what_failed_is_tried_again(
    run_jobs, tmp_path, caplog
) -> None:
    caplog.set_level("INFO")
    assert run_jobs(Jobs("out of memory", "failed", "finished"))[0] == 1
    status, jobs = run_jobs(Jobs("finished"), "resume=auto")
    assert (status, jobs.seeds) == (0, ["seed=1"])
    # What is done is not gone on with.
    _, jobs = run_jobs(Jobs("finished", "finished", "finished"), "resume=auto")
    assert jobs.seeds == ["seed=0", "seed=1", "seed=2"]
    assert len(sweeps(tmp_path)) == 2
    assert str(sweeps(tmp_path)[0]) in caplog.text


def test_other_words_are_another_sweep(run_jobs, tmp_path) -> None:
    run_jobs(Jobs("stopped", stop_after=1))
    (first,) = sweeps(tmp_path)
    run_jobs(Jobs("finished", "finished"), "resume=auto", seeds="seed=0,1")
    assert len(sweeps(tmp_path)) == 2
    with pytest.raises(UserError, match="is a sweep of other settings"):
        run_jobs(Jobs(), f"resume={first}", seeds="seed=0,1")


def test_a_checkpoint_to_start_every_job_from_is_no_sweep_to_go_on_with(run_jobs, tmp_path) -> None:
    _, jobs = run_jobs(Jobs("finished", "finished"), "resume=some/last.ckpt", seeds="seed=0,1")
    assert all("resume=some/last.ckpt" in words for words in jobs.words)


def test_a_job_that_still_writes_its_checkpoint_is_waited_for(
    run_jobs, tmp_path, monkeypatch, caplog
) -> None:
    run_jobs(Jobs("stopped", stop_after=1), seeds="seed=0")
    (folder,) = sweeps(tmp_path)
    monkeypatch.setattr(sweep, "_STOPPING_SECONDS", 1)
    jobs = Jobs()
    with (
        filelock.FileLock(str(folder / "00" / LOCK)),
        pytest.raises(UserError, match="another run is using"),
    ):
        run_jobs(jobs, "resume=auto", seeds="seed=0")
    assert not jobs.words
    assert run_jobs(Jobs("finished"), "resume=auto", seeds="seed=0")[0] == 0


def test_a_row_of_a_job_that_still_runs_is_its_own(tmp_path) -> None:
    write_summary(tmp_path, {"status": "running"})
    with filelock.FileLock(str(tmp_path / LOCK)):
        sweep.note_failure(tmp_path, ["context=512"], 2)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "running"}
    # And so is that of one that reported how it ended.
    write_summary(tmp_path, {"status": "out of memory"})
    sweep.note_failure(tmp_path, ["context=512"], 3)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "out of memory"}


@pytest.mark.longest
@pytest.mark.slow  # five processes, one after the other
def test_a_killed_sweep_takes_its_job_along_and_goes_on_to_the_same_weights(
    tiny_runs: TinyRuns, trained: Path, tmp_path: Path
) -> None:
    script = tmp_path / "kill_the_sweep.py"
    script.write_text(
        "import os, signal, sys, time, pytorch_lightning as pl, flashtrain\n"
        "class Kill(pl.Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if 'KILL' in os.environ and trainer.global_step == 2:\n"
        "            saves, told = signal.getsignal(signal.SIGTERM), []\n"
        "            signal.signal(signal.SIGTERM, lambda *given: (saves(*given), "
        "told.append(given)))\n"
        "            os.kill(int(os.environ.pop('KILL')), signal.SIGKILL)\n"
        "            while not told: time.sleep(0.05)\n"
        "flashtrain.register('callback', 'kill')(lambda settings: Kill())\n"
        "if '-m' in sys.argv and 'resume=auto' not in sys.argv: os.environ['KILL'] = "
        "str(os.getpid())\n"
        "flashtrain.main()\n"
    )
    words = tiny_runs.settings_words(
        f"output={tmp_path / 'runs'}", "trainer.callbacks=[kill]", "trainer.steps=6,4"
    )

    def run(*extra: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), "-m", *extra, *words]
        # Until all end.
        return subprocess.run(command, env=checkout_environment(), capture_output=True, text=True)

    killed = run()
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "runs" / "gpt2-sweep").iterdir()
    row = json.loads((folder / "00" / "summary.json").read_text())
    assert row["status"] == "stopped"
    assert re.search(r"step [23] .*SIGTERM", row["error"])
    assert not (folder / "01").exists()

    done = run("resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    rows = [json.loads((folder / job / "summary.json").read_text()) for job in ("00", "01")]
    assert [(row["status"], row["steps"]) for row in rows] == [("finished", 6), ("finished", 4)]
    weights, expected = (
        read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
        for run in (folder / "00", trained)
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
