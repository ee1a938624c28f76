"""mode=patterns: its settings, and its entry point for a run."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, at_least
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings
from flashtrain.spec import imported


@dataclass
class PatternsSettings:
    """Which decoders are trained and compared; they differ in model.pattern."""

    # Values of model.pattern, words joined by + (gla+gla+gla+full); the others are compared with
    # the first.
    compared: list[str] | None = None
    seeds: int = 3  # trainings of the first, which show how much a seed changes

    def check(self) -> None:
        at_least("patterns.seeds", self.seeds, 1)


class Patterns(Mode):
    """mode=patterns: trains a decoder for each of patterns.compared, and scores all by position and
    by RULER."""

    study = True
    own = ("patterns",)
    shared = ("ruler", "positions")
    example = (
        "recipe=hybrid-quality data=files data.path=BOOKS",
        "trains decoders whose layers differ, scores and compares them",
    )
    run_study = imported("flashtrain_recipes.hybrid_quality.run:run_patterns")

    def check(self, settings: Settings) -> None:
        if settings.task != "language_model" or not settings.patterns.compared:
            raise UserError(
                f"mode=patterns with recipe={settings.recipe}: expected a language model and "
                "patterns.compared=[full, gla], as recipe=hybrid-quality has."
            )
