"""The folder that a run leaves: where it is, what is in it, and how a later command finds its way back into it.

runs/gpt2/2026-11-21_10-15-02/
  config.yaml      the resolved settings (a run can be rebuilt from this file and the checkpoint)
  summary.json     one flat row: what was trained and what came out, also when the run failed
  metrics.csv      every logged number
  checkpoints/     last.ckpt, best.ckpt
  tokenizer/       the tokenizer that the tokens were made with
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed import TCPStore

from flashtrain.errors import UserError
from flashtrain.report.rows import write_atomically
from flashtrain.settings import Settings
from flashtrain.training.checkpoints import BEST, LAST
from flashtrain.typed_settings import typed_settings

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"

# What a summary row's `status` says; RUNNING stays where a run was killed.
RUNNING, FINISHED, STOPPED, FAILED, OUT_OF_MEMORY = "running", "finished", "stopped", "failed", "out of memory"


def new_run_folder(parent: Path) -> Path:
    """A new folder below `parent`, named by the time; the same on every rank of a job of torchrun's or SLURM's.

    Raises UserError when the folder cannot be made.
    """
    shared = _shared_by_ranks(parent)
    if shared is not None:
        return _make(shared)
    return make_unique(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))


def make_unique(parent: Path, name: str) -> Path:
    """Make the folder `parent`/`name`, or `name`-2, -3, ... where that exists already."""
    _make(parent)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}.") from error
        else:
            return folder


def write_config(settings: Settings, folder: Path) -> None:
    """Write the resolved settings to config.yaml."""
    write_atomically(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.structured(settings)))


def read_settings(folder: Path) -> Settings:
    """The settings of the run that left `folder`. Raises UserError when it is no run folder."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it holds no {CONFIG_FILE}.")
    try:
        config = OmegaConf.load(path)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} holds no settings.")
    return typed_settings(config)


def write_summary(folder: Path, row: dict[str, Any]) -> None:
    """Write a run's flat summary row."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(row, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's summary row; empty when it has none yet or the file is not readable."""
    try:
        row = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


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
        raise UserError(f"{setting}={given} does not exist. Give a run folder or a .ckpt in one{auto}.")
    if (path / CONFIG_FILE).is_file():
        order = (LAST, BEST) if prefer == LAST else (BEST, LAST)
        for name in order:
            if (path / CHECKPOINTS / name).exists():
                return path, path / CHECKPOINTS / name
        raise UserError(f"the run in {path} left no checkpoint yet.")
    folder = path.parent.parent
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{given} is neither a run folder nor a checkpoint in one: no {CONFIG_FILE} beside it.")
    return folder, path


def find_unfinished(parent: Path, settings: Settings) -> Path | None:
    """The newest run folder below `parent` that trains the same thing, has a checkpoint and is not finished."""
    if not parent.is_dir():
        return None
    wanted = _what_is_trained(settings)
    for folder in sorted((path for path in parent.iterdir() if path.is_dir()), reverse=True):
        if not (folder / CHECKPOINTS / LAST).exists() or read_summary(folder).get("status") == FINISHED:
            continue
        try:
            found = _what_is_trained(read_settings(folder))
        except UserError:
            continue
        if found == wanted:
            return folder
    return None


def find_same(folders: Iterable[Path], settings: Settings) -> Path | None:
    """The first of these folders whose config.yaml asks for the same, in the same mode, attention and precision."""
    wanted = _what_is_trained(settings)
    for folder in folders:
        if not (folder / CONFIG_FILE).is_file():
            continue
        try:
            there = read_settings(folder)
        except UserError:
            continue
        alike = (there.mode, there.attention, there.hardware.precision) == (
            settings.mode, settings.attention, settings.hardware.precision
        )  # fmt: skip
        if alike and _what_is_trained(there) == wanted:
            return folder
    return None


def _what_is_trained(settings: Settings) -> dict[str, Any]:
    """The settings that make two runs the same training, whatever they run on and are logged to."""
    data = replace(settings.data, workers=None, cache_dir=None)
    images = replace(settings.pathfinder, workers=None, cache_dir=None)
    sequence = replace(settings.sequence, workers=None, cache_dir=None, evaluation_batch=None)
    kept = replace(settings, data=data, pathfinder=images, sequence=sequence)
    trainer = {name: getattr(settings.trainer, name) for name in ("steps", "tokens_per_step")}
    names = ["model", "data", "optimizer", "schedule"]
    if settings.task in ("masked_language_model", "fine_tuning"):
        names += ["bert", "masked", "finetune"]
    if settings.task == "classification":
        names += ["classifier", "sequence", "masked_pixels", "curriculum", "pathfinder"]
    groups = {name: asdict(getattr(kept, name)) for name in names}
    plain = {name: getattr(settings, name) for name in ("recipe", "task", "context", "seed", "weights", "is_demo")}
    return {**plain, **groups, "trainer": trainer}


def _shared_by_ranks(parent: Path) -> Path | None:
    """One folder for ranks that were each started by itself: SLURM's job names it, or torchrun's store carries it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        key = f"flashtrain/run_folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if os.environ["RANK"] == "0":
            store.set(key, str(make_unique(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))))
        return Path(store.get(key).decode())
    if "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return parent / f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_STEP_ID', '0')}"
    return None


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}.") from error
    return folder
