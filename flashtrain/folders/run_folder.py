"""Make and find the folders of runs, and read and write the files in them."""

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
from flashtrain.settings.aliases import updated
from flashtrain.settings.schema import setting_names, typed_settings
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import BEST, LAST, checkpoint_exists

CONFIG_FILE = "config.yaml"  # the resolved settings: with the checkpoint enough to rebuild a run
SUMMARY_FILE = "summary.json"  # one flat row of settings and results, also if the run failed
CHECKPOINTS = "checkpoints"  # last.ckpt and best.ckpt
TOKENIZER = "tokenizer"  # the tokenizer that made the tokens
SAMPLE = "sample.txt"  # text that a language model generated at the end

# Values of `status` in a summary row; RUNNING stays if a run was killed.
RUNNING, FINISHED, STOPPED, FAILED, OUT_OF_MEMORY = "running", "finished", "stopped", "failed", "out of memory"
_SLURM_SECONDS = 600.0  # longest wait for the first rank of a SLURM job to take a folder

_made: set[Path] = set()  # the folders that this process made


def new_run_folder(parent: Path) -> Path:
    """Make a new folder below `parent`, named by the time; the same on all ranks of a torchrun or SLURM job."""
    if slurm_job() is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return _new(parent)
    return _agreed(lambda: _new(parent), parent)


def unfinished_or_new(parent: Path, settings: Settings) -> Path:
    """Find or make the folder for resume=auto and lock it; the same on all ranks of a torchrun or SLURM job.

    Returns:
        The newest folder of an unfinished run with these settings that no process has locked, or a new folder.
    """

    def choose() -> Path:
        folder = find_unfinished(parent, settings, take=True)
        if folder is None:
            say("resume=auto: found no unfinished run with these settings that is not in use, starting a new one.")
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
    """Remove a folder made by this process if it has no config.yaml and no summary.json: its run did not begin."""
    made = folder.absolute()
    if made in _made and not any((folder / name).exists() for name in (CONFIG_FILE, SUMMARY_FILE)):
        let_go(folder)
        shutil.rmtree(folder, ignore_errors=True)
    _made.discard(made)


def write_config(settings: Settings, folder: Path) -> None:
    """Write the resolved settings to config.yaml, so that read_settings returns every text unchanged."""
    # OmegaConf's dumper quotes texts that its reader would read as numbers, and escapes unusual line ends.
    content = yaml.dump(asdict(settings), Dumper=get_omega_conf_dumper(), allow_unicode=False, sort_keys=False)
    write_atomically(folder / CONFIG_FILE, content)


def read_settings(folder: Path) -> Settings:
    """Return the settings of the run in `folder`. Interpolations are not resolved: `${oc.env:NAME}` stays a text.

    Older names of settings are replaced by the current ones (aliases.py). Raises UserError if `folder` is not a run
    folder, or its settings are unknown or invalid.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}.")
    content = read_yaml(path)
    try:
        return typed_settings(OmegaConf.create(literal(_own(updated(content)))))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _own(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.yaml without the groups of other tasks, which older runs have."""
    task = content.get("task", Settings.task)
    others = {name for other in registered("task") if other != task for name in setting_names(other)}
    return {name: value for name, value in content.items() if name in setting_names(task) or name not in others}


def write_summary(folder: Path, row: dict[str, Any]) -> None:
    """Write a run's flat summary row to summary.json."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(row, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary row; empty if the run has none yet."""
    path = folder / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def note_failure(folder: Path, error: str) -> None:
    """Record in the summary row of a run that it failed, if the row says that it is still running."""
    row = read_summary(folder)
    if row.get("status") == RUNNING:
        write_summary(folder, {**row, "status": FAILED, "error": error})


def find_checkpoint(given: str, *, prefer: str, setting: str = "checkpoint") -> tuple[Path, Path]:
    """Find a checkpoint from a path that the user gave.

    Args:
        given: a run folder, or a checkpoint in one.
        prefer: LAST to continue a run, BEST to use its weights; if that one is missing, the other is used.
        setting: name of the setting that holds the path, for messages of errors.

    Returns:
        The run folder and the checkpoint.

    Raises:
        UserError: there is no checkpoint.
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
        raise UserError(f"run {path} has saved no checkpoint: expected {LAST} or {BEST} in its {CHECKPOINTS}/.")
    folder = path.parent.parent
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{given} is neither a run folder nor a checkpoint in one: {folder} has no {CONFIG_FILE}.")
    return folder, path


def find_unfinished(parent: Path, settings: Settings, *, take: bool = False) -> Path | None:
    """Return the newest folder in `parent` of an unfinished run of the same training, with a last.ckpt; else None.

    Args:
        parent: the folder of the runs.
        settings: the settings of the training.
        take: lock the folder for this process, and skip folders that another process has locked.
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
    """Return the first run folder with the same training, mode, attention and precision; None if there is none.

    Args:
        folders: candidates, in this order; those that are not run folders are skipped.
        settings: the settings of the training.
        take: lock the folder for this process, and skip folders that another process has locked.
    """
    wanted = (settings.mode, settings.attention, settings.hardware.precision)
    for folder, there in _of_the_same((path for path in folders if (path / CONFIG_FILE).is_file()), settings):
        if (there.mode, there.attention, there.hardware.precision) == wanted and (not take or try_hold(folder)):
            return folder
    return None


def newest_first(parent: Path) -> list[Path]:
    """Return the folders in `parent`, whose names are times, the newest first."""
    return sorted((path for path in parent.glob("*") if path.is_dir()), reverse=True)


def _of_the_same(folders: Iterable[Path], settings: Settings) -> Iterator[tuple[Path, Settings]]:
    """The run folders of the same training, with their settings. Unreadable settings are skipped with a line."""
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
    """The settings that two runs of the same training share, on any hardware and with any logger."""
    trainer = {name: getattr(settings.trainer, name) for name in ("steps", "tokens_per_step")}
    same = cast(Any, component("task", settings.task)()).same
    names = ["recipe", "task", "seed", "weights", "is_demo", "optimizer", "schedule", *same]
    return {**{name: _of_training(getattr(settings, name)) for name in names}, "trainer": trainer}


def _of_training(given: Any) -> Any:
    """A setting, or a group's settings without those that do not affect training."""
    if not is_dataclass(given):
        return given
    others = ("workers", "cache_dir", "evaluation_batch")
    return {name: value for name, value in vars(given).items() if name not in others}


def _new(parent: Path) -> Path:
    """A new folder for this rank, or the folder that is named by the SLURM job."""
    if slurm_job() is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return make_unique(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
    folder = parent / f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_STEP_ID', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _agreed(choose: Callable[[], Path], parent: Path) -> Path:
    """The folder below `parent` that the first rank chooses, if a launcher started all ranks."""
    # torchrun's store passes its name to the others; SLURM's ranks look for the folder that their first rank holds.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        key = f"flashtrain/folders/run_folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if os.environ["RANK"] == "0":
            store.set(key, str(choose()))
        return Path(store.get(key).decode())
    job = slurm_job()
    return choose() if job is None or is_first_of_job() else _held_by_job(job, parent)


def _held_by_job(job: str, parent: Path) -> Path:
    """Wait for the folder below `parent` that the first rank of this job takes. Raises UserError."""
    until = time.monotonic() + _SLURM_SECONDS
    while time.monotonic() < until:
        for folder in newest_first(parent):
            if is_held_by_job(folder, job):
                return folder
        time.sleep(0.5)
    raise UserError(f"the job's first rank locked no folder in {parent} in {_SLURM_SECONDS:.0f} seconds. See its log.")


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[Path]:
    """Context manager: make a folder as `make_unique` does, and remove it if its body fails or is interrupted."""
    folder = make_unique(parent, name)
    try:
        yield folder
    except BaseException:  # an interruption too
        shutil.rmtree(folder, ignore_errors=True)
        raise
