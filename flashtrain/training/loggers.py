"""Make loggers by name, and log to them: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from flashtrain.announce import say
from flashtrain.files.disk import write_atomically
from flashtrain.training.metrics_file import METRICS, MetricsFile

RUN_ID = "wandb_id.txt"


def make_loggers(
    kinds: Sequence[str],
    run_dir: str | Path,
    *,
    project: str = "flashtrain",
    name: str | None = None,
    group: str | None = None,
    config: dict[str, Any] | None = None,
    mode: str = "auto",
) -> list[Logger]:
    """Make the loggers of a training run. Every run writes run_dir/metrics.jsonl.

    Args:
        kinds: "wandb" adds Weights & Biases, "tensorboard" events in run_dir/tensorboard.
        run_dir: the run's folder. Its wandb_id.txt holds the id of the W&B run, which a
            resumed run continues.
        project, name, group: the W&B project, and the run's name and group in it.
        config: the settings that W&B shows as the run's configuration.
        mode: W&B's mode. "auto": the environment's WANDB_MODE if set, else online if a W&B key is
            configured, else offline, with one line on how to upload the run later.

    Raises:
        ModuleNotFoundError: the logger's package is not installed.
    """
    run_dir = Path(run_dir)
    loggers: list[Logger] = [MetricsFile(run_dir / METRICS)]
    if "tensorboard" in kinds:
        loggers.append(
            TensorBoardLogger(run_dir, name="", version="tensorboard", default_hp_metric=False)
        )
    if "wandb" in kinds:
        # W&B's greetings, warnings and charts: flashtrain prints one line instead.
        if "WANDB_SILENT" not in os.environ:
            import wandb

            wandb.setup(settings=wandb.Settings(silent=True))
        # Under a `wandb sweep` agent wandb reads the run's id from the environment.
        run_id = None if os.environ.get("WANDB_SWEEP_ID") else _stored_id(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        announced = _AnnouncedWandb(
            name=name,
            save_dir=run_dir,
            project=project,
            group=group,
            id=run_id,
            config=config,
            allow_val_change=True,
            mode=_wandb_mode(mode, run_dir, run_id or ""),
        )
        loggers.append(announced)
    return loggers


def has_wandb_key() -> bool:
    """Return whether a Weights & Biases key is configured, in the environment or (by
    `wandb login`) in netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    from requests.utils import get_netrc_auth  # which wandb requires

    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None


def log_summary(loggers: list[Logger], row: dict[str, Any]) -> None:
    """Log a run's summary row to the W&B loggers among `loggers`."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(
                {key: value for key, value in row.items() if value is not None}
            )


def log_table(loggers: list[Logger], name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log rows to W&B as the table `name`, with a column for each key of any row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    # W&B's columns have one type: numbers among texts (lengths 128 and "paragraph") become texts.
    texts = {key for key in columns if any(isinstance(row.get(key), str) for row in rows)}

    def cell(row: Mapping[str, Any], key: str) -> Any:
        value = row.get(key)
        return str(value) if key in texts and value is not None else value

    data = [[cell(row, key) for key in columns] for row in rows]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(name, columns=columns, data=data)


def log_image(loggers: list[Logger], name: str, path: Path) -> None:
    """Log a PNG file to TensorBoard and W&B under `name`."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            import matplotlib.image

            logger.experiment.add_image(name, matplotlib.image.imread(path), dataformats="HWC")
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)])


def close_loggers(loggers: list[Logger]) -> None:
    """Close the Weights & Biases run, so that the next run of this process starts its own,
    and TensorBoard's file."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.close()
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


class LogRates(LearningRateMonitor):
    """Logs each step's learning rates as numbers: torchao's AdamW has tensors, which the schedule
    changes before the loggers write them."""

    def __init__(self) -> None:
        super().__init__(logging_interval="step")

    def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, Any]:
        return super()._extract_lr({"lr": float(param_group["lr"])}, name)


def _wandb_mode(mode: str, folder: Path, run_id: str) -> str:
    """Return the mode for wandb.init; if it is "offline", print how to upload the run."""
    chosen = os.environ.get("WANDB_MODE") if mode == "auto" else mode
    keyless = not chosen and not has_wandb_key()
    if chosen == "offline" or keyless:
        which = f"{folder / 'wandb'}/offline-run-*{run_id}"
        why = "no key configured, logging offline" if keyless else "logging offline"
        say(f"Weights & Biases: {why}. Upload the run later with: wandb sync {which}")
        return "offline"
    return chosen or "online"


class _AnnouncedWandb(WandbLogger):
    """A WandbLogger that prints the address of its run on W&B once that has started online."""

    @property
    def experiment(self) -> Any:
        begins = self._experiment is None and not getattr(rank_zero_only, "rank", 0)
        run = super().experiment
        if begins and self._wandb_init.get("mode") == "online":
            say(f"Weights & Biases: {run.url}")
        return run


def _stored_id(run_dir: Path) -> str:
    """Return the W&B id of the run in this folder; it is written to the folder, so that a resumed
    run continues the same W&B run."""
    file = run_dir / RUN_ID
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    run_id = secrets.token_hex(4)
    if not getattr(rank_zero_only, "rank", 0):
        write_atomically(file, run_id + "\n")
    return run_id
