"""task=fine_tuning: BERT with a head for labels of texts or of their words (recipe=finetune, long-document)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import TRAIN, Condition, Loaded, Prepared, Rule, does, measured_words, say_finished, task_heeds
from flashtrain.tasks.masked_language.spec import MaskedTask

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class FineTuningTask(MaskedTask):
    """BERT on labelled texts; its settings and its demo are told as those of masked text."""

    heeds = ("bert", "finetune", "data", "context")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.fine_tuning.prepare import check_fine_tuning_step

        check_fine_tuning_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        asked = settings.finetune
        return {
            "model": settings.named(settings.bert.label),
            "data": settings.finetune.data_label,
            "target": asked.target,
            "context": settings.context,
            "batch": asked.batch,
            "steps": settings.trainer.steps,
            "samples": settings.trainer.steps * asked.batch,
            "devices": settings.trainer.ranks,
        }

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
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

    def load(self, settings: Settings, hardware: Hardware) -> Loaded:
        from flashtrain.tasks.fine_tuning.evaluate import read_tuned

        tuned = read_tuned(settings, hardware)
        model = tuned.model.eval().to(hardware.kind)
        return Loaded(model, tuned.tokenizer, settings, tuned.folder, tuned.path, tuned.step)


def _labelled(*names: str) -> Condition:
    """Whether these are what is fine-tuned on."""
    return lambda settings: settings.finetune.data in names


def _words(settings: Settings) -> bool:
    return settings.finetune.target == "tokens"


def _texts(settings: Settings) -> bool:
    return settings.finetune.target != "tokens"


def _plain_text(settings: Settings) -> bool:
    return not task_heeds("finetune")(settings)


RULES = (
    Rule(
        "data.path data.config data.split data.text_column data.streaming data.include_tests",
        _plain_text,
        "trainings on plain text; labelled texts are finetune.data, finetune.path and finetune.name",
    ),
    Rule("finetune", does(TRAIN, "evaluate", task="finetune"), "recipe=finetune, long-document"),
    Rule(
        "finetune.length finetune.shortest finetune.labels finetune.presence",
        _labelled("cues"),
        "made-up documents (finetune.data=cues)",
    ),
    Rule(
        "finetune.text_column finetune.words_column finetune.labels_column finetune.validation_fraction",
        _labelled("files", "hub"),
        "finetune.data=files, hub",
    ),
    Rule("finetune.config", _labelled("hub"), "finetune.data=hub"),
    Rule("finetune.words_column", _words, "finetune.target=tokens"),
    Rule("finetune.text_column finetune.pooling", _texts, "finetune.target=labels, class"),
)
