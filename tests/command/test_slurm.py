"""mode=plan --slurm: the script of a job, and the command in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashtrain import __main__ as command
from flashtrain.command import slurm
from flashtrain.command.request import settings_of
from flashtrain.settings.command_line import CommandLine
from flashtrain.spec import Plan

PAGE = Path(__file__).parents[2] / "docs" / "train" / "several-machines.md"


def planned(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["flashtrain", *words])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code)


def test_the_job_runs_the_words_that_were_given(monkeypatch, tmp_path, capfd) -> None:
    """A stand-in for srun writes down the arguments with which the script calls it."""
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "it's.txt").write_text("some text. " * 500)
    monkeypatch.chdir(tmp_path / "a folder")
    data = ("data=files", f"data.path={tmp_path / 'a folder'}/it's.txt", "data.tokenizer=bytes")
    words = ("recipe=gpt2", "trainer.nodes=2", "trainer.strategy=ddp", *data)
    assert planned(monkeypatch, *words, "hardware.plan_for=8xh100", "mode=plan", "--slurm") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "wrote gpt2.sbatch: sbatch gpt2.sbatch"
    script = Path("gpt2.sbatch").read_text()
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    assert {"nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "time=1:00:00"} <= {*options}
    assert f"chdir='{tmp_path / 'a folder'}'" in options

    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f'#!/bin/bash\nwhich python > {tmp_path}/python\nprintf "%s\\n" "$@" > {tmp_path}/given\n'
    )
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{srun.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", "gpt2.sbatch"], check=True, env=environment)
    assert (tmp_path / "python").read_text().strip() == str(Path(sys.executable).parent / "python")
    kill, *start, recipe = (tmp_path / "given").read_text().splitlines()[:5]
    assert (kill, *start) == ("--kill-on-bad-exit=1", "python", "-m", "flashtrain")
    run = settings_of([recipe, *(tmp_path / "given").read_text().splitlines()[5:]])
    assert (run.mode, run.resume, run.hardware.plan_for) == ("train", "auto", None)
    assert (run.trainer.nodes, run.trainer.devices, run.data.path) == (2, 8, data[1][10:])

    assert planned(monkeypatch, *words, "hardware.plan_for=8xh100", "mode=plan", "--slurm") == 2
    assert "gpt2.sbatch is there already, and is not replaced" in capfd.readouterr().err
    assert Path("gpt2.sbatch").read_text() == script  # which may have been changed by hand


@pytest.mark.parametrize(
    ("plan", "hours"),
    [
        (Plan("about 40 s", 40), 1),
        (Plan("at most about 15.1 h", 15.1 * 3600), 23),
        (Plan("the FLOPs are unknown", 0), 24),
        ("of a program's own task", 24),
    ],
)
def test_the_job_has_half_as_much_time_again_as_the_plan(monkeypatch, tmp_path, plan, hours):
    monkeypatch.chdir(tmp_path)
    line = CommandLine(["recipe=gpt2", "mode=plan", "hardware.plan_for=h100", "resume=runs/one"])
    slurm.write_job(settings_of([*line[:3]]), line, plan)
    script = Path("gpt2.sbatch").read_text()
    assert f"--time={hours}:00:00\n" in script
    assert script.endswith("python -m flashtrain recipe=gpt2 resume=runs/one\n")


def test_a_job_is_of_a_plan_for_a_gpu(monkeypatch, tmp_path, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    planned_for = ["mode=plan", "hardware.plan_for=h100"]
    for words in ([planned_for[0]], [planned_for[1]], ["-m", *planned_for, "seed=0,1"]):
        assert planned(monkeypatch, "recipe=gpt2", *words, "--slurm") == 2
        said = capfd.readouterr().err
        assert "--slurm needs mode=plan and hardware.plan_for" in said
        assert "no -m" in said


def test_the_page_shows_the_job_that_its_command_writes(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (written,) = (line for line in PAGE.read_text().splitlines() if line.endswith("--slurm"))
    assert planned(monkeypatch, *written.split()[3:]) == 0
    script = Path("gpt2.sbatch").read_text()
    shown = PAGE.read_text().split("```bash\n#!/bin/bash")[1].split("```")[0]
    here, there = str(Path(sys.executable).parent), "/home/me/.venv/bin"
    assert script.replace(here, there).replace(str(tmp_path), "/home/me") == f"#!/bin/bash{shown}"
