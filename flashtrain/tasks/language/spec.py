"""task=language_model: decoders that predict the next token (recipe=gpt2, gpt2-long, context-extension)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared, Task, contexts_words, mode_of

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class LanguageTask(Task):
    """Next-token training of a registered model on text."""

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        settings.check_step()

    def columns(self, settings: Settings) -> dict[str, Any]:
        from flashtrain.tasks.language.rows import language_columns

        return language_columns(settings)

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
        from flashtrain.tasks.language.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.language.plan import plan_language

        return plan_language(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.tasks.language.rows import say_summary
        from flashtrain.tasks.language.sample import default_prompt

        say_summary(row, folder, settings.prompt or default_prompt(settings.data.source))

    def run_mode(self, settings: Settings, hardware: Hardware) -> int:
        from flashtrain.tasks.language.evaluate import run_language_mode

        mode = mode_of(settings)
        return run_language_mode(settings, hardware) if mode is None else mode.run_checkpoint(settings, hardware)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        trained = f"{demo.data.tokenizer} as tokens, {contexts_words(demo)}"
        return (
            f"training the recipe's small demo model instead ({trained}). For the recipe in full "
            f"({full.model.name}-{full.model.size}, {contexts_words(full)}), {where}"
        )
