"""The files in a run's folder: its settings, its summary row and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.yaml_files import literal, read_yaml
from flashtrain.registry import registered
from flashtrain.settings.aliases import completed, updated
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


def write_config(settings: Mapping[str, Any], folder: Path) -> None:
    """Write the resolved settings, as plain values, to config.yaml: read_settings returns every text unchanged."""
    # OmegaConf's dumper quotes texts that its reader would read as numbers, and escapes unusual line ends.
    content = yaml.dump(settings, Dumper=get_omega_conf_dumper(), allow_unicode=False, sort_keys=False)
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
    """The content of a config.yaml for its task: without other tasks' groups, which older runs have, and completed."""
    task = content.get("task", Settings.task)
    others = {name for other in registered("task") if other != task for name in setting_names(other)}
    own = {name: value for name, value in content.items() if name in setting_names(task) or name not in others}
    return completed(own, setting_names(task))


def write_summary(folder: Path, row: dict[str, Any]) -> None:
    """Write a run's flat summary row to summary.json."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(row, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary row; empty if the run has none yet."""
    path = folder / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def note_failure(folder: Path, error: str) -> None:
    """Record in the summary row of a run that it failed, if the row says that it is still running."""
    if (row := read_summary(folder)).get("status") == RUNNING:
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
        for name in (LAST, BEST) if prefer == LAST else (BEST, LAST):
            if checkpoint_exists(path / CHECKPOINTS / name):
                return path, path / CHECKPOINTS / name
        raise UserError(f"run {path} has saved no checkpoint: expected {LAST} or {BEST} in its {CHECKPOINTS}/.")
    folder = path.parent.parent
    if not (folder / CONFIG_FILE).is_file():
        runs = sorted(path.glob(f"*/{CONFIG_FILE}"))
        hint = f" The newest run in it is {runs[-1].parent}." if runs else ""
        hint = f" It is an exported model: use model.path={given}." if (path / "config.json").is_file() else hint
        raise UserError(f"{setting}={given} is neither a run folder (with a {CONFIG_FILE}) nor a .ckpt in one.{hint}")
    return folder, path
