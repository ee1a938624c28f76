"""mode=lengths: its settings, and its entry points for a run."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, at_least
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings
from flashtrain.spec import imported


@dataclass
class LengthsSettings:
    """Which contexts are compared, and on which held-out tokens."""

    contexts: list[int] | None = None  # the contexts, each of which is trained
    window: int | None = None  # tokens of a held-out window; null: the longest context
    scored: int = 1024  # how many of a window's last tokens are scored, by every model
    stride: int = 256  # tokens scored in each forward pass of perplexity_sliding
    windows: int = 128  # how many windows, at most

    @property
    def longest(self) -> int:
        """How many tokens each held-out window has."""
        return self.window if self.window is not None else max(self.contexts or [1])

    def check(self) -> None:
        for name in ("scored", "stride", "windows"):
            at_least(f"lengths.{name}", getattr(self, name), 1)
        if self.contexts is not None and (
            not self.contexts or len(set(self.contexts)) < len(self.contexts)
        ):
            raise UserError(
                f"lengths.contexts={list(self.contexts)}: expected one or more different numbers."
            )

    def check_together(self) -> None:
        """Raise UserError for lengths.* settings that contradict one another."""
        # apart from check(), since a machine without a GPU may put the recipe's demo in these
        # settings' place first
        if not self.contexts:
            return
        if min(self.contexts) < self.scored:
            raise UserError(
                f"lengths.scored={self.scored} tokens do not fit the context of "
                f"{min(self.contexts)}: every model must hold all scored tokens at once. Lower "
                "lengths.scored, or leave that context out."
            )
        if max(self.contexts) > self.longest:
            raise UserError(
                f"lengths.window={self.longest} is shorter than the context of "
                f"{max(self.contexts)}, which it could not fill: raise lengths.window."
            )
        if self.stride > self.scored:
            raise UserError(
                f"lengths.stride={self.stride} must be at most lengths.scored={self.scored}: lower "
                "lengths.stride."
            )


class Lengths(Mode):
    """mode=lengths: trains a language model (recipe=gpt2-long) or BERT
    (recipe=long-document) at several contexts."""

    study = True
    own = ("lengths",)
    requested_by = "lengths.contexts"
    example = (
        "recipe=gpt2-long lengths.contexts=[1024,4096]",
        "trains each, scores all on the same held-out tokens",
    )
    plan = imported("flashtrain_recipes.context_study:study_plan")
    run_study = imported("flashtrain_recipes.context_study:run_study")

    def contexts(self, settings: Settings) -> list[int]:
        return list(settings.lengths.contexts or ())

    def check(self, settings: Settings) -> None:
        if not settings.lengths.contexts:
            raise UserError(
                f"mode=lengths trains each of lengths.contexts, which recipe={settings.recipe} "
                "does not name: add lengths.contexts=[1024,2048], or take recipe=gpt2-long."
            )
        if settings.shares_sequences:
            raise UserError(
                "mode=lengths trains several contexts, and "
                f"trainer.strategy={settings.strategy} shards each sequence. Use "
                "trainer.strategy=ddp or fsdp, or train one context with mode=train."
            )
