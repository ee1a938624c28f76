"""task=fine_tuning: BERT with a head for labels of texts or of their words (recipe=finetune, long-document)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel, TrainingSetup, measured_words, say_finished
from flashtrain.tasks.fine_tuning.settings import LabelledSettings
from flashtrain.tasks.masked_language.spec import MaskedTask

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class FineTuningTask(MaskedTask):
    """BERT on labelled texts; its settings and its demo are described as those of masked text."""

    settings = LabelledSettings
    modes: Mapping[str, str] = {"evaluate": "context data finetune bert.residual", "export": "context"}
    same = ("context", "data", "bert", "finetune")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.fine_tuning.prepare import check_fine_tuning_step

        check_fine_tuning_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        own = settings.finetune
        return {
            "model": settings.named(settings.bert.label),
            "data": settings.finetune.data_label,
            "target": own.target,
            "context": settings.context,
            "batch": own.batch,
            "steps": settings.trainer.steps,
            "samples": settings.trainer.steps * own.batch,
            "devices": settings.trainer.ranks,
        }

    def prepare(self, settings: Settings, hardware: Hardware) -> TrainingSetup:
        from flashtrain.tasks.fine_tuning.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.fine_tuning.prepare import plan_fine_tuning

        return plan_fine_tuning(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.tasks.fine_tuning.task import score_of

        rate = row["tokens_per_second"]
        speed = "" if rate is None else f"{rate:,.0f} real tokens/s{measured_words(row)}, "
        what = f"{row['model']} on {row['data']}, context {row['context']:,}"
        say_finished(
            folder,
            f"finished {what}: {score_of(row)}, on {row['scored']} texts",
            f"{speed}{row['samples']:,} texts trained on, {row['seconds']:.0f} s for the whole command",
        )

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain.tasks.fine_tuning.evaluate import run_fine_tuning_mode

        return run_fine_tuning_mode(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> TrainedModel:
        from flashtrain.tasks.fine_tuning.evaluate import read_tuned

        tuned = read_tuned(settings, hardware)
        model = tuned.model.eval().to(hardware.kind)
        return TrainedModel(model, tuned.tokenizer, settings, tuned.folder, tuned.path, tuned.step)
