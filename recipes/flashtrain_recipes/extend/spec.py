"""mode=extend: its entry point for a run."""

from __future__ import annotations

from flashtrain.errors import UserError
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings
from flashtrain.spec import imported


class Extend(Mode):
    """mode=extend: trains a model on through `stages`, then scores it by RULER and by position
    beside the model as it was, and beside the rotary scaling alone."""

    study = True
    shared = ("ruler", "positions")
    example = (
        "recipe=extend model.path=FOLDER data=files data.path=CODE",
        "trains at longer contexts, scores before and after",
    )
    run_study = imported("flashtrain_recipes.extend.run:run_extend")

    def check(self, settings: Settings) -> None:
        if settings.task != "language_model" or not settings.stages:
            raise UserError(
                f"mode=extend with recipe={settings.recipe}: expected a language model with "
                "stages=[{context: ..., steps: ...}], as recipe=extend has."
            )
        if settings.model.name != "huggingface":
            raise UserError(
                f"mode=extend with model={settings.model.name}: expected model=huggingface. An "
                "export of another model is one (mode=export)."
            )
        if settings.ruler.tasks is not None:
            from flashtrain_recipes.ruler.tasks import RULER

            if not {*settings.ruler.tasks} & {*RULER}:
                raise UserError(
                    f"ruler.tasks={list(settings.ruler.tasks)}: mode=extend compares the mean over "
                    "RULER's own tasks. Name one of them."
                )
