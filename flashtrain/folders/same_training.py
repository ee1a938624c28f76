"""The folders of earlier runs of the same training: those to resume, and those that have been trained already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CHECKPOINTS, CONFIG_FILE, FINISHED, read_settings, read_summary
from flashtrain.folders.run_lock import let_go, try_hold
from flashtrain.registry import component
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import LAST, checkpoint_exists


def find_unfinished(parent: Path, settings: Settings) -> Path | None:
    """Return the newest folder in `parent` of an unfinished run of the same training, with a last.ckpt; else None.

    The folder is locked for this process. Folders that another process has locked are skipped.
    """
    for folder, _ in _of_the_same((path for path in newest_first(parent) if _is_unfinished(path)), settings):
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
    trainer = {name: getattr(settings.trainer, name) for name in ("steps", "epochs", "tokens_per_step")}
    if settings.trainer.epochs is not None:
        del trainer["steps"]  # a run's folder has those that were counted from its data
    same = cast(Any, component("task", settings.task)()).same
    names = ["recipe", "task", "seed", "weights", "is_demo", "optimizer", "schedule", *same]
    return {**{name: _of_training(getattr(settings, name)) for name in names}, "trainer": trainer}


def _of_training(given: Any) -> Any:
    """A setting, or a group's settings without those that do not affect training."""
    if not is_dataclass(given):
        return given
    others = ("workers", "cache_dir", "evaluation_batch")
    return {name: value for name, value in vars(given).items() if name not in others}
