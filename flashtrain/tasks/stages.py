"""Several trainings in one run, its stages: each has the run's settings, changed by its entry in a
list, and starts from the weights of the one before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import OmegaConf

from flashtrain.errors import UserError
from flashtrain.files.yaml_files import literal
from flashtrain.registry import component
from flashtrain.settings.options import REPLACES
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
        """The name of the stage's folder inside the run's; "" for a single stage."""
        return "" if self.count == 1 else f"stage-{self.number + 1}-{self.label}"

    @property
    def steps(self) -> int:
        """The most optimizer steps of the stage."""
        return self.settings.trainer.steps

    def begin(self, folder: Path) -> Settings:
        """Seed the random generators; return the settings, with that seed and a logger's names."""
        # Another seed for each stage: short stages of the same data would read the same first
        # samples, over and over. Set anew here, so that a stage that is begun by a later command
        # is begun alike.
        seed = (self.settings.seed + self.number) % (MAX_SEED + 1)
        pl.seed_everything(seed, verbose=False)
        logger, name = self.settings.logger, f"{self.settings.recipe}-{folder.name}"
        if self.folder:
            run_name, group = f"{logger.run_name or name}-{self.folder}", logger.group or name
            logger = replace(logger, run_name=run_name, group=group)
        return self.settings.having(seed=seed, logger=logger)


def changed_by(settings: Settings, entry: Any, where: str) -> Settings:
    """Return the run's settings, changed by a stage's entry and checked. Raises UserError for a
    setting that cannot work, which names the entry by `where`."""
    config = OmegaConf.create(literal(asdict(settings)))
    for key, name in _places(entry).items():
        if (value := asdict(entry)[key]) is not None:
            OmegaConf.update(config, name, literal(value))
    try:
        made = typed_settings(config)
        made.check()
        component("schedule", made.schedule.name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return made


def _places(entry: Any) -> dict[str, str]:
    """Return {a stage's setting: dotted name of the run's setting that it replaces}."""
    return {one.name: one.metadata[REPLACES] for one in fields(entry) if REPLACES in one.metadata}


def check_used_by_stages(setting: str, entries: Sequence[Any], given: Collection[str]) -> None:
    """Raise UserError for a setting of the command line (`given`) that changes nothing, since each
    of the `entries` in the list `setting` has its own value."""
    for key, name in _places(entries[0]).items() if entries and setting not in given else ():
        if name in given and all(getattr(one, key) is not None for one in entries):
            raise UserError(
                f"{name} changes nothing: each of {setting} has its own {key}. Change it "
                f"there, or use {setting}=[] to train a single stage by the other settings."
            )
