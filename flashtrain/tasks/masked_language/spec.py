"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert, bert-lamb)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared, Task, bert_demo_line

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class MaskedTask(Task):
    """BERT on masked text."""

    groups = ("bert", "masked", "finetune")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.masked_language.steps import check_masked_step

        check_masked_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        from flashtrain.tasks.masked_language.rows import masked_columns

        return masked_columns(settings)

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
        from flashtrain.tasks.masked_language.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.masked_language.plan import plan_masked

        return plan_masked(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.tasks.masked_language.rows import say_masked

        say_masked(row, folder, settings)

    def run_mode(self, settings: Settings, hardware: Hardware) -> int:
        from flashtrain.tasks.masked_language.evaluate import run_masked_mode

        return run_masked_mode(settings, hardware)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        return bert_demo_line(full, demo, where)
