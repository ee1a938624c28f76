"""task=classification and mode=preview: their entry points for a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flashtrain.errors import UserError
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings
from flashtrain.spec import Names, Task, imported
from flashtrain_recipes.arena.settings import ClassificationSettings


class ClassificationTask(Task):
    """task=classification: trains classifiers of long sequences, in stages
    (recipe=pathx, path256, lra-*)."""

    settings = ClassificationSettings
    has_epochs = False  # each stage has its steps
    shards = False
    modes: Mapping[str, Names] = {
        "evaluate": ("sequence", "pathfinder"),
        "export": ("export_precision",),
    }
    same = ("classifier", "sequence", "masked_pixels", "curriculum", "pathfinder")
    logged = ("train_loss", "validation_loss", "validation_accuracy")
    columns = imported("flashtrain_recipes.arena.words:trained_columns")
    trainings = imported("flashtrain_recipes.arena.curriculum:trainings")
    plan = imported("flashtrain_recipes.arena.words:plan_classifier")
    report = imported("flashtrain_recipes.arena.words:report_classified")
    run_mode = imported("flashtrain_recipes.arena.evaluate:run_classifier_mode")
    load = imported("flashtrain_recipes.arena.evaluate:load_classifier")
    of_checkpoint = imported("flashtrain_recipes.arena.evaluate:of_last_stage")
    for_weights = imported("flashtrain_recipes.arena.evaluate:settings_for_weights")
    is_carried = imported("flashtrain_recipes.arena.resumed:is_carried")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.stages import check_used_by_stages
        from flashtrain_recipes.arena.stages import stages_of

        check_used_by_stages("curriculum.stages", settings.curriculum.stages, given)
        stages_of(settings)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        from flashtrain_recipes.arena.words import trained_line

        trained, meant = trained_line(demo), trained_line(full)
        return (
            f"the recipe's small demo instead ({trained}). "
            f"For the recipe in full ({meant}), {where}"
        )


class Preview(Mode):
    """mode=preview (recipe=pathfinder-preview): draws some images of Pathfinder as a picture."""

    measures = True
    requested_by = "pathfinder.preview"
    example = ("recipe=pathfinder-preview", "a recipe that draws its data")
    plan = imported("flashtrain_recipes.arena.pathfinder.preview:preview_plan")
    run = imported("flashtrain_recipes.arena.pathfinder.preview:preview")

    def uses(self, settings: Settings) -> tuple[str, ...]:
        return ("pathfinder", "output")

    def check(self, settings: Settings) -> None:
        if not isinstance(settings, ClassificationSettings):
            raise UserError(
                "mode=preview draws images of Pathfinder: choose recipe=pathfinder-preview."
            )
