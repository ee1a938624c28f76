"""Where a run's metrics go: always metrics.csv in its folder, and Weights & Biases where asked for."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only

from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.files.foreign_files import read_text
from flashtrain.training.metrics_file import MetricsFile

KINDS = ("none", "csv", "wandb")
MODES = ("auto", "online", "offline")
METRICS = "metrics.csv"
RUN_ID = "wandb_id.txt"


def make_loggers(
    kind: str,
    run_dir: str | Path,
    *,
    project: str = "flashtrain",
    name: str | None = None,
    group: str | None = None,
    run_id: str | None = None,
    config: dict[str, Any] | None = None,
    mode: str = "auto",
) -> list[Logger]:
    """The loggers of a training run. Every run writes run_dir/metrics.csv; kind="wandb" adds Weights & Biases.

    kind: "csv" and "none" write the files only. run_id: the W&B run to continue; None takes the one that an earlier
    run in run_dir left in wandb_id.txt, or begins a new one. group: what W&B lists together (the runs of a sweep).
    config: logged as the run's configuration. mode: "auto" is online where a W&B key is configured, else offline with
    one line that says how to send the run later; the environment's WANDB_MODE decides over "auto". Driven by a
    `wandb sweep` agent, the run keeps the id that the agent gave it.
    Raises UserError for an unknown kind or mode, or where wandb is wanted but not installed.
    """
    if kind not in KINDS:
        raise unknown("logger", kind, KINDS)
    run_dir = Path(run_dir)
    loggers: list[Logger] = [MetricsFile(run_dir / METRICS)]
    if kind == "wandb":
        loggers.append(_wandb(run_dir, project, name, group, run_id, config, mode))
    return loggers


def has_wandb_key() -> bool:
    """Whether a Weights & Biases key is configured: in the environment, or in the netrc file as `wandb login` does."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    given = os.environ.get("NETRC")
    home = Path.home()
    for path in [Path(given)] if given else [home / ".netrc", home / "_netrc"]:
        if not path.is_file():
            continue
        try:
            if netrc.netrc(str(path)).authenticators(host) is not None:
                return True
        except (netrc.NetrcParseError, OSError):
            continue
    return False


def log_figure(project: str, *, group: str | None, folder: str | Path, figure: str | Path, mode: str = "auto") -> None:
    """Log a sweep's figure (a PNG file) to Weights & Biases, as a run of its own in the sweep's group.

    folder: the sweep's, in which wandb keeps its files. mode: as for `make_loggers`. Call it when no other W&B run is
    under way. Raises UserError for an unknown mode or a missing wandb.
    """
    wandb = _import_wandb()
    run = wandb.init(
        project=project,
        group=group,
        name=Path(folder).name,
        dir=str(folder),
        job_type="sweep",
        mode=_wandb_mode(mode, Path(folder)),
        reinit="finish_previous",
    )
    run.log({Path(figure).stem: wandb.Image(str(figure))})
    run.finish()


def log_summary(loggers: list[Logger], row: dict[str, Any]) -> None:
    """Put a run's summary row into the loggers that keep one (Weights & Biases)."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update({key: value for key, value in row.items() if value is not None})


def log_table(loggers: list[Logger], name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put rows into the loggers that keep tables (Weights & Biases): a column for each key of any row.

    A column of numbers and words, such as lengths of 128 and of a "paragraph", becomes words: theirs have one type.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    worded = {key for key in columns if any(isinstance(row.get(key), str) for row in rows)}

    def cell(row: Mapping[str, Any], key: str) -> Any:
        value = row.get(key)
        return str(value) if key in worded and value is not None else value

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(name, columns=columns, data=[[cell(row, key) for key in columns] for row in rows])


def log_image(loggers: list[Logger], name: str, path: Path) -> None:
    """Put a PNG file into the loggers that keep images (Weights & Biases)."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)])


def close_loggers(loggers: list[Logger]) -> None:
    """End the Weights & Biases run, so that the next run of this process begins its own."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _import_wandb() -> Any:
    if importlib.util.find_spec("wandb") is None:
        raise UserError("logger=wandb needs the package wandb, which is not installed: pip install wandb")
    import wandb

    return wandb


def _wandb_mode(mode: str, folder: Path, run_id: str = "") -> str:
    """The mode to give to wandb.init, after saying how to sync where "auto" became offline."""
    if mode not in MODES:
        raise unknown("wandb mode", mode, MODES)
    chosen = os.environ.get("WANDB_MODE") if mode == "auto" else mode
    if chosen:
        return chosen
    if has_wandb_key():
        return "online"
    which = f"{folder / 'wandb'}/offline-run-*{run_id}"
    rank_zero_info(f"Weights & Biases: no key configured, logging offline; send the run later with: wandb sync {which}")
    return "offline"


def _wandb(
    run_dir: Path,
    project: str,
    name: str | None,
    group: str | None,
    run_id: str | None,
    config: dict[str, Any] | None,
    mode: str,
) -> WandbLogger:
    _import_wandb()
    options: dict[str, Any] = {}
    if group is not None:
        options["group"] = group
    if config is not None:
        options.update(config=config, allow_val_change=True)
    if os.environ.get("WANDB_SWEEP_ID"):
        run_id = None  # the agent has put its run's id into the environment, where wandb finds it
    else:
        run_id = _remembered_id(run_dir, run_id)
        options["id"] = run_id

    options["mode"] = _wandb_mode(mode, run_dir, run_id or "")
    run_dir.mkdir(parents=True, exist_ok=True)
    return WandbLogger(name=name, save_dir=run_dir, project=project, **options)


def _remembered_id(run_dir: Path, run_id: str | None) -> str:
    """The W&B id of the run in this folder, written down so that resuming continues the same W&B run."""
    file = run_dir / RUN_ID
    if run_id is None and file.exists():
        run_id = read_text(file, most=1000).strip() or None  # empty: written by a run that was killed meanwhile
        if run_id is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):  # the file may be anybody's
            raise UserError(f"{file} holds no id of a W&B run: remove it, and a new W&B run begins.")
    if run_id is None:
        run_id = secrets.token_hex(4)
    if not getattr(rank_zero_only, "rank", 0):
        write_atomically(file, run_id + "\n")
    return run_id
