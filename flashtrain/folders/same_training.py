"""The folders of earlier runs of the same training: those to resume, and those that have been trained already."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast

from flashtrain.announce import say
from flashtrain.errors import UserError, first_line
from flashtrain.folders.run_folder import CHECKPOINTS, CONFIG_FILE, FINISHED, read_settings, read_summary
from flashtrain.folders.run_lock import let_go, try_hold
from flashtrain.registry import component
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import LAST, checkpoint_exists

_NOT_TRAINED = ("workers", "cache_dir", "evaluation_batch")  # settings of groups that do not affect training
_PATHS = ("weights", "model.path", "data.path", "data.validation_path", "finetune.path")
_LISTED = 4  # differing settings that are listed


def find_unfinished(parent: Path, settings: Settings) -> Path | None:
    """Return the newest folder in `parent` of an unfinished run of the same training, with a last.ckpt; else None.

    The folder is locked for this process. Folders that another process has locked are skipped. If there is none, a line
    names the unfinished run that differs in the fewest settings, and these.
    """
    others: dict[int, str] = {}  # number of different settings -> the newest run that differs in so many
    for folder, _, differing in _compared(newest_first(parent), settings, _is_unfinished):
        if differing:
            listed = ", ".join([*differing[:_LISTED], *(["..."] if len(differing) > _LISTED else [])])
            others.setdefault(len(differing), f"{folder}, differs in {listed}")
        elif try_hold(folder):
            if _is_unfinished(folder):
                return folder
            let_go(folder)  # it has finished since
    if others:
        say(f"resume=auto: the unfinished run with the nearest settings, {others[min(others)]}.")
    return None


def find_same(folders: Iterable[Path], settings: Settings, *, take: bool = False) -> Path | None:
    """Return the first run folder with the same training, mode, attention and precision; None if there is none.

    Args:
        folders: candidates, in this order; those that are not run folders are skipped.
        settings: the settings of the training.
        take: lock the folder for this process, and skip folders that another process has locked.
    """
    wanted = (settings.mode, settings.attention, settings.hardware.precision)
    for folder, there, differing in _compared(folders, settings, lambda path: (path / CONFIG_FILE).is_file()):
        same = (there.mode, there.attention, there.hardware.precision) == wanted and not differing
        if same and (not take or try_hold(folder)):
            return folder
    return None


def refuse_other_run(folder: Path, settings: Settings, setting: str) -> None:
    """Raise UserError if a run in this run folder, which `setting` names, would overwrite a finished or another one."""
    resumed = Path(settings.resume or os.devnull).expanduser().resolve()
    if settings.resume == "auto" or folder.resolve() in (resumed, *resumed.parents):
        return
    differing = _differing(settings, read_settings(folder))
    if differing or read_summary(folder).get("status") == FINISHED:
        what = f"a run that differs in {', '.join(differing[:_LISTED])}" if differing else "a finished run"
        raise UserError(f"{setting}={folder} has {what}. Use another folder, or resume=auto to continue that run.")


def newest_first(parent: Path) -> list[Path]:
    """Return the folders in `parent`, whose names are times, the newest first."""
    return sorted((path for path in parent.glob("*") if path.is_dir()), reverse=True)


def _compared(
    folders: Iterable[Path], settings: Settings, wanted: Callable[[Path], bool]
) -> Iterator[tuple[Path, Settings, list[str]]]:
    """The wanted run folders, with their settings and what differs. One that cannot be read is skipped with a line."""
    for folder in folders:
        try:
            if not wanted(folder):
                continue
            there = read_settings(folder)
            differing = _differing(settings, there)
        except Exception as error:  # noqa: BLE001 - whatever a power cut, an editor or another version left there
            say(f"skipping {folder}: {first_line(error)}")
        else:
            yield folder, there, differing


def _differing(here: Settings, there: Settings) -> list[str]:
    """The settings in which two runs are not of the same training, each with both values."""
    ours, theirs = _what_is_trained(here), _what_is_trained(there)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"{name} ({theirs.get(name)} there, {ours.get(name)} here)" for name in names]


def _is_unfinished(folder: Path) -> bool:
    return checkpoint_exists(folder / CHECKPOINTS / LAST) and read_summary(folder).get("status") != FINISHED


def _what_is_trained(settings: Settings) -> dict[str, Any]:
    """The settings, by name, that two runs of the same training share, on any hardware and with any logger."""
    trained = ["trainer.steps", "trainer.epochs", "trainer.tokens_per_step"]
    if settings.trainer.epochs is not None:
        trained.remove("trainer.steps")  # a run's folder has those that were counted from its data
    same = cast(Any, component("task", settings.task)()).same
    names = ["recipe", "task", "seed", "weights", "is_demo", "optimizer", "schedule", *same]
    found = {name: getattr(settings.trainer, name.partition(".")[2]) for name in trained}
    for name in names:
        value = getattr(settings, name)
        if is_dataclass(value):
            found |= {f"{name}.{own}": one for own, one in vars(value).items() if own not in _NOT_TRAINED}
        else:
            found[name] = value
    return {name: _resolved(value) if name in _PATHS else value for name, value in found.items()}


def _resolved(path: str | None) -> str | None:
    """The path in full if it exists: ./text and text are one folder. A name of the hub stays as it is."""
    found = None if path is None else Path(path).expanduser()
    return str(found.resolve()) if found is not None and found.exists() else path
