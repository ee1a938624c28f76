"""task=fine_tuning: BERT with a head for labels of texts or of their words (recipe=finetune, long-document)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared, Task, bert_demo_line

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class FineTuningTask(Task):
    """BERT on labelled texts."""

    groups = ("bert", "masked", "finetune")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.fine_tuning.steps import check_fine_tuning_step

        check_fine_tuning_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        from flashtrain.tasks.fine_tuning.rows import fine_tuning_columns

        return fine_tuning_columns(settings)

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
        from flashtrain.tasks.fine_tuning.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.fine_tuning.plan import plan_fine_tuning

        return plan_fine_tuning(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.tasks.fine_tuning.rows import say_fine_tuned

        say_fine_tuned(row, folder, settings)

    def run_mode(self, settings: Settings, hardware: Hardware) -> int:
        from flashtrain.tasks.fine_tuning.evaluate import run_fine_tuning_mode

        return run_fine_tuning_mode(settings, hardware)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        return bert_demo_line(full, demo, where)
