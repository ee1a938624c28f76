"""mode=positions: its settings, and its entry point for a run."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, at_least
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings
from flashtrain.spec import imported


@dataclass
class PositionsSettings:
    """The held-out documents whose loss is taken by position."""

    length: int | None = None  # how many tokens of each document are scored; null: the context
    # Tokens that a document must have; null: one more than positions.length. The same value makes
    # results of different lengths ones of the same documents.
    at_least: int | None = None
    documents: int = 20  # how many of these documents, at most
    # Tokens by which a model whose context is shorter moves on; null: it reads documents whole.
    stride: int | None = None
    # A result.json of another model on the same documents, from which the differences are shown.
    against: str | None = None

    def check(self) -> None:
        at_least("positions.length", self.length, 2)
        at_least("positions.documents", self.documents, 2)
        at_least("positions.stride", self.stride, 1)


class Positions(Mode):
    """mode=positions: the loss by position in held-out documents, and the same tokens' loss behind
    another document."""

    of_checkpoint = of_weights = True
    own = ("positions",)
    example = (
        "mode=positions checkpoint=RUN positions.length=16384",
        "does the text before a token help to predict it?",
    )
    run_checkpoint = imported("flashtrain_recipes.loss_by_position.run:score_positions")

    def uses(self, settings: Settings) -> tuple[str, ...]:
        return (
            "positions", "checkpoint", "weights", "attention", "context", "data", "mask", "model",
            "output",
        )  # fmt: skip

    def check(self, settings: Settings) -> None:
        if settings.task != "language_model":
            raise UserError(
                f"mode=positions with recipe={settings.recipe}, task={settings.task}: expected a "
                "language model, as recipe=gpt2 or recipe=hf trains."
            )
