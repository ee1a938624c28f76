"""task=fine_tuning: BERT with a head for labels of texts or of their words
(recipe=bert-finetune, long-document)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import Names, imported, measured_words, report_finished
from flashtrain.tasks.fine_tuning.settings import LabelledSettings
from flashtrain.tasks.masked_language.spec import MaskedTask


class FineTuningTask(MaskedTask):
    """task=fine_tuning: BERT with a classification head, trained on labelled texts."""

    settings = LabelledSettings
    modes: Mapping[str, Names] = {
        "evaluate": ("context", "data", "finetune"),
        "export": ("context",),
    }
    same = ("context", "data", "bert", "finetune")
    logged = (*MaskedTask.logged, "validation_micro_f1")
    prepare = imported("flashtrain.tasks.fine_tuning.prepare:prepare")
    plan = imported("flashtrain.tasks.fine_tuning.prepare:plan_fine_tuning")
    run_mode = imported("flashtrain.tasks.fine_tuning.evaluate:run_fine_tuning_mode")
    load = imported("flashtrain.tasks.fine_tuning.evaluate:load_fine_tuned")

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

    def report(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.tasks.fine_tuning.task import score_of

        rate = row["tokens_per_second"]
        speed = "" if rate is None else f"{rate:,.0f} real tokens/s{measured_words(row)}, "
        what = f"{row['model']} on {row['data']}, context {row['context']:,}"
        report_finished(
            folder,
            f"finished {what}: {score_of(row)}, on {row['scored']} texts",
            (
                f"{speed}{row['samples']:,} texts trained on, {row['seconds']:.0f} s "
                "for the whole command"
            ),
        )
