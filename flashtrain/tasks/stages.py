"""Several trainings in one run, its stages: each has the run's settings with changes, and starts
from the weights of the one before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import OmegaConf

from flashtrain.errors import UserError
from flashtrain.files.yaml_files import literal
from flashtrain.registry import component
from flashtrain.settings.schema import typed_settings
from flashtrain.settings.settings import MAX_SEED, Settings
from flashtrain.tasks import optimization  # noqa: F401 - it registers the schedules that stages name


@dataclass(frozen=True)
class TrainingStage:
    """One stage of a run."""

    number: int  # from 0
    count: int  # of all stages
    settings: Settings  # the run's, changed to train this stage alone
    label: str  # what tells it from others, as part of a folder's name: context-65536

    @property
    def name(self) -> str:
        """The stage in words, as "stage 2 of 3, context 65536"."""
        return f"stage {self.number + 1} of {self.count}, {self.label.replace('-', ' ')}"

    @property
    def folder(self) -> str:
        """The name of the stage's folder inside the run's; "" for a single stage, which has
        none."""
        return "" if self.count == 1 else f"stage-{self.number + 1}-{self.label}"

    @property
    def steps(self) -> int:
        """The most optimizer steps of the stage."""
        return self.settings.trainer.steps

    def begin(self) -> Settings:
        """Seed the random generators, and return the stage's settings with that seed."""
        # Another seed for each stage: short stages of the same data would read the same first
        # samples, over and over. Set anew here, so that a stage that is begun by a later command
        # is begun alike.
        seed = (self.settings.seed + self.number) % (MAX_SEED + 1)
        pl.seed_everything(seed, verbose=False)
        return self.settings.having(seed=seed)

    def logged(self, folder: Path) -> Settings:
        """Return the stage's settings with logger.run_name and logger.group set: all stages of the
        run in `folder` are one group of its logger."""
        if not self.folder:
            return self.settings
        logger, name = self.settings.logger, f"{self.settings.recipe}-{folder.name}"
        run_name, group = f"{logger.run_name or name}-{self.folder}", logger.group or name
        return self.settings.having(logger=replace(logger, run_name=run_name, group=group))


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return settings with changes by dotted names. Raises UserError for a value of another type,
    and for an unknown schedule."""
    config = OmegaConf.create(literal(asdict(settings)))
    for name, value in changes.items():
        OmegaConf.update(config, name, literal(value))
    made = typed_settings(config)
    component("schedule", made.schedule.name)
    return made


def check_used_by_stages(
    setting: str, places: Mapping[str, str], stages: Collection[Any], given: Collection[str]
) -> None:
    """Raise UserError for a setting of the command line that changes nothing, since each stage
    sets its own value.

    Args:
        setting: the list of stages.
        places: {a stage's setting: the run's setting that it replaces}.
        stages: the names of the settings that each stage sets.
        given: names of the settings on the command line.
    """
    for key, name in places.items():
        if setting not in given and name in given and stages and all(key in one for one in stages):
            raise UserError(
                f"{name} changes nothing: each of {setting} has its own {key}. Change it "
                f"there, or use {setting}=[] to train a single stage by the other settings."
            )
