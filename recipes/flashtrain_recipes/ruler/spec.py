"""mode=ruler: its settings, and its entry point for a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError, at_least, one_of
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


@dataclass
class RulerSettings:
    """Which prompts a model answers, and the text that they are made of."""

    lengths: list[int] | None = None  # tokens of a prompt and its answer; null: `context`
    tasks: list[str] | None = None  # null: RULER's eleven, own_qa_1 and own_qa_2
    samples: int = 20  # prompts of a task at each length
    samples_beyond_32k: int = 10  # the same at lengths above 32,768
    # The file or folder of the text that hides needles; null: Python's standard library.
    path: str | None = None
    # Whether prompts are messages in the tokenizer's chat template; null: if it has one.
    chat: bool | None = None

    def check(self) -> None:
        for name in ("samples", "samples_beyond_32k"):
            at_least(f"ruler.{name}", getattr(self, name), 1)
        if self.tasks is not None:
            from flashtrain_recipes.ruler.tasks import TASKS

            for task in self.tasks:
                one_of("ruler.tasks", task, TASKS)


class Ruler(Mode):
    """mode=ruler: what a language model finds, follows and counts in prompts of each length."""

    of_checkpoint = of_weights = True
    own = ("ruler",)
    example = (
        "mode=ruler checkpoint=RUN ruler.lengths=[4096,8192]",
        "what is found, followed and counted in long prompts?",
    )

    def uses(self, settings: Settings) -> tuple[str, ...]:
        tokens = [f"data.{name}" for name in ("tokenizer", "vocab", "merges", "begin_of_text")]
        model = ("checkpoint", "weights", "attention", "context", "mask", "model", *tokens)
        return ("ruler", "output", *model)

    def check(self, settings: Settings) -> None:
        if settings.task != "language_model":
            raise UserError(
                f"mode=ruler with recipe={settings.recipe}, task={settings.task}: expected a "
                "language model."
            )

    def run_checkpoint(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain_recipes.ruler.run import evaluate_ruler

        return {"rows": evaluate_ruler(settings, hardware, uses=self.uses)}
