"""Find the folders of earlier runs of the same training, to resume them or because they are
finished already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast

from flashtrain.announce import say
from flashtrain.errors import first_line
from flashtrain.folders.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    FINISHED,
    older_values,
    read_settings,
    read_summary,
)
from flashtrain.folders.run_lock import let_go, try_hold
from flashtrain.registry import component
from flashtrain.settings.aliases import NEWER
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import LAST, checkpoint_exists

# settings of groups that do not affect training.
_NOT_TRAINED = ("workers", "cache_dir", "evaluation_batch")
_PATHS = ("weights", "model.path", "data.path", "data.validation_path", "finetune.path")
_LISTED = 4  # differing settings that are listed


def find_unfinished(parent: Path, settings: Settings, given: Collection[str] = ()) -> Path | None:
    """Return the newest folder in `parent` of an unfinished run of the same training, with
    a last.ckpt; else None.

    A run that is older than a setting may differ in it, unless the setting is `given`. The folder
    is locked for this process. Folders that another process has locked are skipped. If there is no
    such folder, a line is printed on the unfinished run that differs in the fewest settings, and on
    these settings.
    """
    # Number of different settings -> the newest run that differs in so many.
    others: dict[int, str] = {}
    for folder, _, differing in _compared(newest_first(parent), _is_unfinished, settings, given):
        if differing:
            listed = ", ".join(
                [*differing[:_LISTED], *(["..."] if len(differing) > _LISTED else [])]
            )
            others.setdefault(len(differing), f"{folder}, differs in {listed}")
        elif try_hold(folder):
            if _is_unfinished(folder):
                return folder
            let_go(folder)  # it has finished since
    if others:
        say(f"resume=auto: the unfinished run with the nearest settings, {others[min(others)]}.")
    return None


def find_same(folders: Iterable[Path], settings: Settings, *, take: bool = False) -> Path | None:
    """Return the first of the run folders whose training, mode, attention and precision are those
    of `settings`; None if there is none.

    Args:
        folders: candidates, in this order; those that are not run folders are skipped.
        settings: the settings of the training.
        take: lock the folder for this process, and skip folders that another process has locked.
    """
    wanted = (settings.mode, settings.attention, settings.hardware.precision)
    for folder, there, differing in _compared(
        folders, lambda path: (path / CONFIG_FILE).is_file(), settings
    ):
        same = (there.mode, there.attention, there.hardware.precision) == wanted and not differing
        if same and (not take or try_hold(folder)):
            return folder
    return None


def newest_first(parent: Path) -> list[Path]:
    """Return the folders in `parent`, whose names are times, the newest first."""
    return sorted((path for path in parent.glob("*") if path.is_dir()), reverse=True)


def _compared(
    folders: Iterable[Path],
    wanted: Callable[[Path], bool],
    here: Settings,
    given: Collection[str] = NEWER,
) -> Iterator[tuple[Path, Settings, list[str]]]:
    """Yield each `wanted` run folder with its settings and the names of those by which it is
    another training than `here`; print a line on folders that cannot be read."""
    for folder in folders:
        try:
            if not wanted(folder):
                continue
            there = read_settings(folder)
            ours = _what_is_trained(here)
            theirs = _what_is_trained(there)
            older = older_values(here, there, given)
        except Exception as error:  # noqa: BLE001 - whatever a power cut, an editor or another version left there
            say(f"skipping {folder}: {first_line(error)}")
        else:
            names = [
                name
                for name in {**ours, **theirs}
                if ours.get(name) != theirs.get(name) and name not in older
            ]
            yield (
                folder,
                there,
                [f"{name} ({theirs.get(name)} there, {ours.get(name)} here)" for name in names],
            )


def _is_unfinished(folder: Path) -> bool:
    return (
        checkpoint_exists(folder / CHECKPOINTS / LAST)
        and read_summary(folder).get("status") != FINISHED
    )


def _what_is_trained(settings: Settings) -> dict[str, Any]:
    """Return, by name, the settings that decide what is trained: two runs of the same training
    share them, on any hardware and with any logger."""
    trained = ["trainer.steps", "trainer.epochs", "trainer.tokens_per_step"]
    if settings.trainer.epochs is not None:
        trained.remove("trainer.steps")  # a run's folder has those that were counted from its data
    same = cast(Any, component("task", settings.task)()).same
    names = ["recipe", "task", "seed", "weights", "is_demo", "optimizer", "schedule", *same]
    found = {name: getattr(settings.trainer, name.partition(".")[2]) for name in trained}
    for name in names:
        value = getattr(settings, name)
        if is_dataclass(value):
            found |= {
                f"{name}.{own}": one for own, one in vars(value).items() if own not in _NOT_TRAINED
            }
        else:
            found[name] = value
    return {name: _resolved(value) if name in _PATHS else value for name, value in found.items()}


def _resolved(path: str | None) -> str | None:
    """Return the absolute path if the path exists, since ./text and text are one folder; anything
    else, such as a name on the hub, unchanged."""
    found = None if path is None else Path(path).expanduser()
    return str(found.resolve()) if found is not None and found.exists() else path
