"""The folder that a run leaves: where it is, what is in it, and how a later command finds its way back into it.

runs/gpt2/2026-11-21_10-15-02/
  config.yaml      the resolved settings (a run can be rebuilt from this file and the checkpoint)
  summary.json     one flat row: what was trained and what came out, also when the run failed
  metrics.jsonl    every logged number
  checkpoints/     last.ckpt, best.ckpt
  sample.txt       what a language model wrote at the end
  report.html      a page of all this, and flashtrain.log what was said
  tokenizer/       the tokenizer that the tokens were made with
  .lock            held while a run lives (run_lock.py)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from torch.distributed import TCPStore

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.yaml_files import literal, read_yaml
from flashtrain.folders.run_lock import hold, is_first_of_job, is_held_by_job, let_go, slurm_job, try_hold
from flashtrain.registry import component, registered
from flashtrain.settings.schema import setting_names, typed_settings
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import BEST, LAST, checkpoint_exists

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"
SAMPLE = "sample.txt"

# What a summary row's `status` says; RUNNING stays where a run was killed.
RUNNING, FINISHED, STOPPED, FAILED, OUT_OF_MEMORY = "running", "finished", "stopped", "failed", "out of memory"
_SLURM_SECONDS = 600.0  # in which the first rank of a job of SLURM's takes a folder

_made: set[Path] = set()  # the new folders of this process


def new_run_folder(parent: Path) -> Path:
    """A new folder below `parent`, named by the time; the same on every rank of a job of torchrun's or SLURM's."""
    if slurm_job() is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return _new(parent)
    return _agreed(lambda: _new(parent), parent)


def unfinished_or_new(parent: Path, settings: Settings) -> Path:
    """What resume=auto goes on with, held by this process: find_unfinished's folder, or a new one where none is free.

    The same on every rank of a job of torchrun's or SLURM's.
    """

    def choose() -> Path:
        folder = find_unfinished(parent, settings, take=True)
        if folder is None:
            say("resume=auto: no unfinished run with these settings is free, starting a new one.")
            folder = _new(parent)
            hold(folder)
        return folder

    return _agreed(choose, parent)


def make_unique(parent: Path, name: str) -> Path:
    """Make the folder `parent`/`name`, or `name`-2, -3, ... where that exists already."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    _made.add(folder.absolute())
    return folder


def remove_unused(folder: Path) -> None:
    """Remove a folder that this process has made, where neither settings nor a row came into it: a run that could not
    begin leaves nothing behind."""
    made = folder.absolute()
    if made in _made and not any((folder / name).exists() for name in (CONFIG_FILE, SUMMARY_FILE)):
        let_go(folder)
        shutil.rmtree(folder, ignore_errors=True)
    _made.discard(made)


def write_config(settings: Settings, folder: Path) -> None:
    """Write the resolved settings to config.yaml, such that read_settings gives every text as it is."""
    # OmegaConf's dumper quotes the texts that its reader would take for numbers; odd line ends are escaped.
    content = yaml.dump(asdict(settings), Dumper=get_omega_conf_dumper(), allow_unicode=False, sort_keys=False)
    write_atomically(folder / CONFIG_FILE, content)


def read_settings(folder: Path) -> Settings:
    """The settings of the run that left `folder`. Raises UserError when it is no run folder, or names other settings.

    Nothing in the file is looked up: `${oc.env:NAME}` is a text.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}.")
    content = read_yaml(path)
    try:
        return typed_settings(OmegaConf.create(literal(_own(content))))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _own(content: dict[str, Any]) -> dict[str, Any]:
    """What is in a config.yaml without the groups of other tasks, which runs had before each task had its own."""
    task = content.get("task", Settings.task)
    others = {name for other in registered("task") if other != task for name in setting_names(other)}
    return {name: value for name, value in content.items() if name in setting_names(task) or name not in others}


def write_summary(folder: Path, row: dict[str, Any]) -> None:
    """Write a run's flat summary row."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(row, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's summary row; empty when it has none yet."""
    path = folder / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def note_failure(folder: Path, error: str) -> None:
    """Let the row of a run that was under way say that it failed; any other row stays."""
    row = read_summary(folder)
    if row.get("status") == RUNNING:
        write_summary(folder, {**row, "status": FAILED, "error": error})


def find_checkpoint(given: str, *, prefer: str, setting: str = "checkpoint") -> tuple[Path, Path]:
    """(run folder, checkpoint) for what a user gave: a run folder or a checkpoint in one.

    prefer: LAST to continue a run, BEST to use its weights; the other is taken where that one is missing.
    setting: that it was given by. Raises UserError when there is no checkpoint.
    """
    path = Path(given).expanduser()
    if not path.exists():
        auto = ", or resume=auto for the newest unfinished run" if setting == "resume" else ""
        raise UserError(f"{setting}={given} does not exist. Use a run folder or a .ckpt in one{auto}.")
    if (path / CONFIG_FILE).is_file():
        order = (LAST, BEST) if prefer == LAST else (BEST, LAST)
        for name in order:
            if checkpoint_exists(path / CHECKPOINTS / name):
                return path, path / CHECKPOINTS / name
        raise UserError(f"run {path} has no checkpoint yet.")
    folder = path.parent.parent
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{given} is neither a run folder nor a checkpoint in one: {folder} has no {CONFIG_FILE}.")
    return folder, path


def find_unfinished(parent: Path, settings: Settings, *, take: bool = False) -> Path | None:
    """The newest run folder below `parent` that trains the same thing, has a checkpoint and is not finished.

    take: hold it for this process, passing over those in which another runs.
    """
    for folder, _ in _of_the_same((path for path in newest_first(parent) if _is_unfinished(path)), settings):
        if not take:
            return folder
        if try_hold(folder):
            if _is_unfinished(folder):
                return folder
            let_go(folder)  # it has finished since
    return None


def find_same(folders: Iterable[Path], settings: Settings, *, take: bool = False) -> Path | None:
    """The first of these folders whose config.yaml asks for the same, in the same mode, attention and precision.

    take: hold it for this process, passing over those in which another runs.
    """
    wanted = (settings.mode, settings.attention, settings.hardware.precision)
    for folder, there in _of_the_same((path for path in folders if (path / CONFIG_FILE).is_file()), settings):
        if (there.mode, there.attention, there.hardware.precision) == wanted and (not take or try_hold(folder)):
            return folder
    return None


def newest_first(parent: Path) -> list[Path]:
    """The folders in `parent`, whose names are times, the newest first."""
    return sorted((path for path in parent.glob("*") if path.is_dir()), reverse=True)


def _of_the_same(folders: Iterable[Path], settings: Settings) -> Iterator[tuple[Path, Settings]]:
    """Of these folders those that hold the same training, with their settings. One whose settings cannot be read is
    named, and passed over."""
    wanted = _what_is_trained(settings)
    for folder in folders:
        try:
            there = read_settings(folder)
        except UserError as error:
            say(f"skipping {folder}: {error}")
            continue
        if _what_is_trained(there) == wanted:
            yield folder, there


def _is_unfinished(folder: Path) -> bool:
    return checkpoint_exists(folder / CHECKPOINTS / LAST) and read_summary(folder).get("status") != FINISHED


def _what_is_trained(settings: Settings) -> dict[str, Any]:
    """The settings that make two runs the same training, whatever they run on and are logged to."""
    trainer = {name: getattr(settings.trainer, name) for name in ("steps", "tokens_per_step")}
    same = cast(Any, component("task", settings.task)()).same
    names = ["recipe", "task", "seed", "weights", "is_demo", "optimizer", "schedule", *same]
    return {**{name: _of_training(getattr(settings, name)) for name in names}, "trainer": trainer}


def _of_training(given: Any) -> Any:
    """A setting, or a group's settings without those that say nothing of what is trained."""
    if not is_dataclass(given):
        return given
    others = ("workers", "cache_dir", "evaluation_batch")
    return {name: value for name, value in vars(given).items() if name not in others}


def _new(parent: Path) -> Path:
    """A new folder for this rank, or the one named by SLURM's job."""
    if slurm_job() is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return make_unique(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
    folder = parent / f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_STEP_ID', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _agreed(choose: Callable[[], Path], parent: Path) -> Path:
    """The folder below `parent` that the first rank chooses, where a launcher has started every rank by itself.

    torchrun's store carries the name; SLURM's ranks look for the folder that their first one holds.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        key = f"flashtrain/folders/run_folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if os.environ["RANK"] == "0":
            store.set(key, str(choose()))
        return Path(store.get(key).decode())
    job = slurm_job()
    return choose() if job is None or is_first_of_job() else _held_by_job(job, parent)


def _held_by_job(job: str, parent: Path) -> Path:
    """The folder below `parent` that the first rank of this job has taken, waited for. Raises UserError."""
    until = time.monotonic() + _SLURM_SECONDS
    while time.monotonic() < until:
        for folder in newest_first(parent):
            if is_held_by_job(folder, job):
                return folder
        time.sleep(0.5)
    raise UserError(f"the first rank of this job took no folder in {parent} within {_SLURM_SECONDS:.0f} seconds.")


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder `parent`/`name` (`name`-2, -3, ... where that exists), which is removed again if writing into it
    fails or is interrupted."""
    folder = make_unique(parent, name)
    try:
        yield folder
    except BaseException:  # an interruption too
        shutil.rmtree(folder, ignore_errors=True)
        raise
