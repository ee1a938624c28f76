"""The files in a run's folder: its settings, its summary row and its checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json
from flashtrain.files.yaml_files import literal, read_yaml
from flashtrain.registry import registered
from flashtrain.settings.aliases import NEWER, completed, updated
from flashtrain.settings.schema import setting_names, settings_config, typed_settings
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.checkpoints import BEST, LAST, checkpoint_exists

CONFIG_FILE = "config.yaml"  # the resolved settings: with the checkpoint enough to rebuild a run
SUMMARY_FILE = "summary.json"  # one flat row of settings and results, also if the run failed
CHECKPOINTS = "checkpoints"  # last.ckpt and best.ckpt
SETTINGS = "settings"  # key of a checkpoint: the values of config.yaml
TOKENIZER = "tokenizer"  # the tokenizer that made the tokens
SAMPLE = "sample.txt"  # text that a language model generated at the end

# Values of `status` in a summary row; RUNNING stays if a run was killed.
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
OUT_OF_MEMORY = "out of memory"


def write_config(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the resolved settings to config.yaml, and return its plain values: every text
    is read back unchanged."""
    # OmegaConf's dumper quotes texts that its reader would read as numbers, and
    # escapes unusual line ends.
    content = yaml.dump(
        settings, Dumper=get_omega_conf_dumper(), allow_unicode=False, sort_keys=False
    )
    return read_yaml(write_atomically(folder / CONFIG_FILE, content, sync=True))


def read_settings(folder: Path) -> Settings:
    """Return the settings of the run in `folder`. Interpolations are not resolved:
    `${oc.env:NAME}` stays a text.

    Older names of settings are replaced by the current ones (aliases.py). Raises UserError if
    `folder` is not a run folder, or its settings are unknown or invalid.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}.")
    return _settings(read_yaml(path), path)


def settings_at(folder: Path, checkpoint: Path) -> Settings:
    """Return the settings of the run in `folder`, as they were in the stage of its `checkpoint`."""
    own = read_settings(folder)
    return task_of(own).of_checkpoint(own, checkpoint)


def _settings(content: Any, path: Path) -> Settings:
    """Return the settings in the content of a config.yaml, without groups of other tasks, which
    files of older runs have."""
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings: it is empty or damaged.")
    content = updated(content)
    task = content.get("task", Settings.task)
    others = {
        name for other in registered("task") if other != task for name in setting_names(other)
    }
    own = {
        name: value
        for name, value in content.items()
        if name in setting_names(task) or name not in others
    }
    try:
        return typed_settings(OmegaConf.create(literal(completed(own, setting_names(task)))))
    except UserError as error:
        raise UserError(f"the settings in {path} cannot be used: {error}") from error


def check_config(checkpoint: Path, saved: Mapping[str, Any]) -> None:
    """Compare a run's config.yaml with the settings in its checkpoint (`saved`),
    and print what differs.

    Raises UserError if config.yaml lacks a setting of the checkpoint.
    """
    path = checkpoint.parent.parent / CONFIG_FILE
    if not path.is_file():  # a checkpoint outside of any run
        return
    if (stored := saved.get(SETTINGS)) is None:
        say(
            f"{checkpoint} stores no settings, since an older version saved it: "
            f"{path} is taken as it is."
        )
        return
    content = read_yaml(path)
    here = _flat(asdict(_settings(content, path)))
    there = _flat(asdict(_settings(stored, checkpoint)))
    written = _flat(updated(content))
    if missing := [
        f"{name}={one}" for name, one in _flat(updated(stored)).items() if name not in written
    ]:
        raise UserError(
            f"{path} lacks {', '.join(missing)}, which {checkpoint.name} was saved with. "
            "Add what is missing to that file."
        )
    if changed := [
        f"{name} {there.get(name)} -> {one}" for name, one in here.items() if there.get(name) != one
    ]:
        line = f"{path} has changed since {checkpoint.name} was saved: {', '.join(changed)}."
        say(line, level=logging.WARNING)


def as_begun(settings: Settings, folder: Path, given: Collection[str]) -> Settings:
    """Return `settings` for a run that continues the one in `folder`, with its `older_values` in
    place of newer defaults, and print these."""
    older = older_values(settings, read_settings(folder), given)
    config = settings_config(settings)
    for name, value in older.items():
        OmegaConf.update(config, name, value)
    if older:
        say(f"as in {folder}: {' '.join(f'{name}={value}' for name, value in older.items())}")
    return typed_settings(config)


def older_values(here: Settings, there: Settings, given: Collection[str]) -> dict[str, Any]:
    """Return, by name, the values of settings `there` (an older run's) that differ from `here` only
    because that run is older than the setting; those that are `given` are left out."""
    ours, theirs = _flat(asdict(here)), _flat(asdict(there))
    newer = {name: value for name, value in NEWER.items() if name in ours and name not in given}
    return {name: value for name, value in newer.items() if theirs.get(name) == value != ours[name]}


def _flat(content: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Return nested settings as one dict, by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= (
            _flat(value, f"{group}{name}.")
            if isinstance(value, dict)
            else {f"{group}{name}": value}
        )
    return found


def write_summary(folder: Path, row: dict[str, Any]) -> None:
    """Write a run's flat summary row to summary.json."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(row, indent=2) + "\n", sync=True)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary row; empty if the run has none yet."""
    path = folder / SUMMARY_FILE
    return read_json(path) if path.is_file() else {}


def note_failure(folder: Path, error: str) -> None:
    """Record in the summary row of a run that it failed, if the row says that
    it is still running."""
    if (row := read_summary(folder)).get("status") == RUNNING:
        write_summary(folder, {**row, "status": FAILED, "error": error})


def words_of_run(folder: Path, words: Sequence[str]) -> list[str]:
    """Return the words of the command that began the run in `folder`, with those on top that
    continue it with its own settings."""
    names = [word.partition("=")[0] for word in words]
    begun = read_summary(folder).get("overrides", "").split()
    kept = [word for word in begun if word.partition("=")[0] not in names]
    return kept + [word for word in words if not word.startswith("resume=")]


def last_checkpoint(settings: Settings, folder: Path) -> Path | None:
    """Return the checkpoint of resume=RUN, or for resume=auto that in `folder`; None without."""
    if settings.resume not in (None, "auto"):
        return find_checkpoint(settings.resume, prefer=LAST, setting="resume")[1]
    own = folder / CHECKPOINTS / LAST
    return own if settings.resume and own.exists() else None


def find_checkpoint(given: str, *, prefer: str, setting: str = "checkpoint") -> tuple[Path, Path]:
    """Find a checkpoint from a path that the user gave.

    Args:
        given: a run folder, or a checkpoint in one.
        prefer: LAST to continue a run, BEST to use its weights; if that checkpoint is missing, the
            other one is used.
        setting: name of the setting that holds the path, for messages of errors.

    Returns:
        The run folder and the checkpoint.

    Raises:
        UserError: there is no checkpoint.
    """
    path = Path(given).expanduser()
    if not path.exists():
        auto = ", or resume=auto for the newest unfinished run" if setting == "resume" else ""
        raise UserError(
            f"{setting}={given} does not exist. Use a run folder or a .ckpt in one{auto}."
        )
    if (path / CONFIG_FILE).is_file():
        for name in (LAST, BEST) if prefer == LAST else (BEST, LAST):
            if checkpoint_exists(path / CHECKPOINTS / name):
                return path, path / CHECKPOINTS / name
        raise UserError(
            f"run {path} has saved no checkpoint: expected {LAST} or {BEST} in its {CHECKPOINTS}/."
        )
    folder = path.parent.parent
    if not (folder / CONFIG_FILE).is_file():
        runs = sorted(path.glob(f"*/{CONFIG_FILE}"))
        hint = f" The newest run in it is {runs[-1].parent}." if runs else ""
        if (path / "config.json").is_file():
            hint = f" It is an exported model: use model.path={given}."
        raise UserError(
            f"{setting}={given} is neither a run folder (with a {CONFIG_FILE}) nor a "
            f".ckpt in one.{hint}"
        )
    return folder, path
