"""task=classification and mode=preview, as a run asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.spec import Mode, Task, TrainedModel, TrainingSetup
from flashtrain_recipes.arena.settings import ClassificationSettings

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from flashtrain.training.hardware import Hardware


class ClassificationTask(Task):
    """Classifiers of long sequences, in stages (recipe=pathx, path256, lra-*)."""

    settings = ClassificationSettings
    shards = False
    modes: Mapping[str, str] = {"evaluate": "sequence pathfinder", "export": "export_precision"}
    same = ("classifier", "sequence", "masked_pixels", "curriculum", "pathfinder")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain_recipes.arena.stages import check_used_by_stages, stages_of

        check_used_by_stages(settings, set(given))
        stages_of(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        from flashtrain_recipes.arena.words import trained_columns

        return trained_columns(settings)

    def trainings(
        self, settings: Settings, hardware: Hardware, folder: Path, overrides: list[str]
    ) -> Iterator[TrainingSetup]:
        from flashtrain_recipes.arena.curriculum import trainings

        return trainings(settings, hardware, folder, overrides)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain_recipes.arena.words import plan_classifier

        return plan_classifier(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain_recipes.arena.words import say_classified

        say_classified(row, folder, settings)

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain_recipes.arena.evaluate import run_classifier_mode

        return run_classifier_mode(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> TrainedModel:
        from flashtrain_recipes.arena.evaluate import load_classifier

        return load_classifier(settings, hardware)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        from flashtrain_recipes.arena.words import trained_line

        return (
            f"training the recipe's small demo instead ({trained_line(demo)}). "
            f"For the recipe in full ({trained_line(full)}), {where}"
        )

    def of_checkpoint(self, settings: Settings) -> Settings:
        from flashtrain_recipes.arena.evaluate import of_last_stage

        return of_last_stage(settings)

    def for_weights(self, words: Sequence[str], given: dict[str, Override]) -> Settings | None:
        from flashtrain_recipes.arena.evaluate import settings_for_weights

        return settings_for_weights(words, given)

    def is_carried(self, resume: str) -> bool:
        from flashtrain_recipes.arena.resumed import is_carried

        return is_carried(resume)


class Preview(Mode):
    """mode=preview (recipe=pathfinder-preview): a picture of some images; no attention is computed."""

    measures = True

    def uses(self, settings: Settings) -> str:
        return "pathfinder output"

    def check(self, settings: Settings) -> None:
        if not isinstance(settings, ClassificationSettings):
            raise UserError("mode=preview draws images of Pathfinder: choose recipe=pathfinder-preview.")

    def is_asked(self, settings: Settings) -> bool:
        return isinstance(settings, ClassificationSettings) and settings.pathfinder.preview is not None

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain_recipes.arena.pathfinder.preview import preview_plan

        return preview_plan(settings, hardware)

    def run(
        self, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
    ) -> dict[str, Any]:
        from flashtrain_recipes.arena.pathfinder.preview import preview

        return preview(settings, hardware, folder, overrides=overrides, started=started)
