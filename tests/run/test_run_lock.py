"""One process at a time in a run's folder, and a lock that ends with its process."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import filelock
import pytest
from tiny_runs import checkout_environment

from flashtrain.__main__ import main
from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import new_run_folder, remove_unused, run_folder
from flashtrain.folders.run_folder import read_settings, read_summary, write_config, write_summary
from flashtrain.folders.run_lock import HOLDER, LOCK, Busy, hold, is_first_of_job, let_go
from flashtrain.folders.same_training import find_same, find_unfinished
from flashtrain.settings.command_line import CommandLine


class Other:
    """Another process that holds a folder, until it is killed."""

    def __init__(self, folder: Path) -> None:
        script = (
            "import sys, pathlib; from flashtrain.folders.run_lock import hold\n"
            f"hold(pathlib.Path({str(folder)!r})); print('held', flush=True); sys.stdin.read()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=checkout_environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An unfinished run in which another process lives."""
    folder = tmp_path_factory.mktemp("runs") / "2026-01-02_00-00-00"
    leave_unfinished(folder)
    other = Other(folder)
    yield folder
    other.kill()


def leave_unfinished(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    write_config(asdict(compose_settings(["recipe=gpt2"])), folder)
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"x")
    write_summary(folder, {"status": "running"})


@pytest.mark.integration
def test_a_folder_in_which_another_process_runs_is_refused_and_reports_whose_it_is(
    live: Path,
) -> None:
    with pytest.raises(
        Busy, match=r"another run is using .*: process \d+ on .* since 20"
    ) as refusal:
        hold(live)
    assert "\n" not in str(refusal.value)


@pytest.mark.integration
def test_resume_auto_passes_over_a_run_that_lives(live: Path, tmp_path: Path, caplog) -> None:
    settings = compose_settings(["recipe=gpt2"])
    with caplog.at_level("INFO"):
        assert find_unfinished(live.parent, settings) is None
    assert f"skipping {live}: another run is using" in caplog.text
    assert find_same([live], settings, take=True) is None

    older = live.parent / "2026-01-01_00-00-00"
    leave_unfinished(older)
    assert find_unfinished(live.parent, settings) == older
    let_go(older)


@pytest.mark.integration
def test_hydra_run_dir_of_a_run_that_lives_is_refused_before_hydra_writes_there(
    live: Path, monkeypatch, capsys
) -> None:
    words = ["recipe=gpt2", "hardware=cpu", f"hydra.run.dir='{live}'"]
    monkeypatch.setattr(sys, "argv", ["flashtrain", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == Busy.status
    assert f"another run is using {live}" in capsys.readouterr().err
    assert not (live / ".hydra").exists()


def test_a_run_lets_go_of_its_folder_at_its_end(trained: Path) -> None:
    assert not (trained / HOLDER).exists()
    with filelock.FileLock(str(trained / LOCK), timeout=0):
        pass


@pytest.mark.integration
@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),  # torchrun
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),  # of another machine
        ({"LOCAL_RANK": "1"}, False),  # Lightning has started it with the first rank's words
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, True),
    ],
)
def test_of_ranks_that_train_together_the_first_holds_the_folder(
    live: Path, monkeypatch, environment: dict[str, str], first: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_of_job() is first
    if not first:
        hold(live)  # its first rank's: no refusal


@pytest.mark.integration
def test_slurms_other_ranks_go_where_their_first_one_has_gone(live: Path, monkeypatch) -> None:
    settings = compose_settings(["recipe=gpt2", "seed=8", "resume=auto"])
    settings.output, settings.recipe = str(live.parent.parent), live.parent.name
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    first = run_folder(settings, CommandLine())
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert run_folder(settings, CommandLine()) == first == live.parent / "slurm-77-0"
    monkeypatch.setenv("SLURM_PROCID", "0")
    let_go(first)


def test_a_file_system_without_locks_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    def no_locks(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    with caplog.at_level("INFO"):
        hold(tmp_path)
    let_go(tmp_path)
    assert "without locks" in caplog.text


def test_a_folder_with_a_row_and_a_folder_of_others_are_never_removed(tmp_path: Path) -> None:
    used = new_run_folder(tmp_path)
    write_summary(used, {"status": "failed"})
    remove_unused(used)
    assert read_summary(used) == {"status": "failed"}
    others = tmp_path / "others"
    others.mkdir()
    remove_unused(others)
    assert others.is_dir()


def test_what_a_killed_process_had_half_written_goes_when_the_folder_is_taken_again(
    tmp_path: Path,
) -> None:
    half, whole = tmp_path / "stage-1" / ".summary.json.4711.unfinished", tmp_path / "summary.json"
    half.parent.mkdir()
    half.write_text("{")
    whole.write_text("{}")
    hold(tmp_path)
    let_go(tmp_path)
    assert not half.exists()
    assert whole.read_text() == "{}"


def test_links_within_a_folder_and_those_of_wandb_are_no_matter(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "debug.log").symlink_to(tmp_path / "log")
    (folder / "latest").symlink_to(folder / "wandb")
    hold(folder)
    let_go(folder)


def test_hydra_run_dir_of_a_finished_run_is_refused_and_its_own_goes_on(
    trained: Path, tmp_path: Path
) -> None:
    trained = shutil.copytree(trained, tmp_path / "run")
    settings = read_settings(trained)
    settings.hardware.demo = "never"
    words = CommandLine([f"hydra.run.dir='{trained}'", "trainer.steps=6"])
    with pytest.raises(UserError, match="has a finished run"):
        run_folder(settings, words)
    for resume in ("auto", str(trained)):
        settings.resume = resume
        assert run_folder(settings, words) == trained
    settings.resume = None
    write_summary(trained, {"status": "failed"})  # as a sweep's job that is started again
    assert run_folder(settings, words) == trained
