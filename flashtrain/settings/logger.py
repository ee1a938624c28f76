"""The group `logger`: where the metrics of a run are logged, next to its folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import get_args

from flashtrain.errors import UserError, one_of
from flashtrain.settings.options import Logger, LoggerMode, option


@dataclass
class LoggerSettings:
    """The loggers of metrics (conf/logger). Every run writes metrics.jsonl; wandb is online
    if a key is configured."""

    # Where metrics are logged too: none, csv, tensorboard, wandb, or a list of them.
    name: str = "wandb"
    project: str = "flashtrain"  # the project of Weights & Biases in which runs are logged
    run_name: str | None = None  # the run's name in Weights & Biases; null: chosen there
    group: str | None = None  # the group of Weights & Biases that a sweep's runs share
    # Whether Weights & Biases uploads; auto: online if a key is configured.
    mode: str = option("auto", LoggerMode)

    @property
    def kinds(self) -> list[str]:
        """The names of the loggers in `name`, which separates several by commas."""
        return [kind.strip() for kind in self.name.split(",")]

    def check_installed(self) -> None:
        """Raise UserError if the package of a chosen logger is not installed."""
        for kind in self.kinds:
            if kind in ("tensorboard", "wandb") and find_spec(kind) is None:
                raise UserError(
                    f"logger={kind} needs the package {kind}, which is not installed: "
                    f"pip install {kind}"
                )

    def check(self) -> None:
        for kind in self.kinds:
            one_of("logger", kind, get_args(Logger))
