"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert, bert-lamb)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flashtrain.mode import contexts_words
from flashtrain.settings.settings import Settings
from flashtrain.spec import Names, Task, imported, losses_words, measured_words, report_finished
from flashtrain.tasks.masked_language.settings import MaskedLanguageSettings


class MaskedTask(Task):
    """task=masked_language_model: BERT trained on text to predict masked tokens."""

    settings: type[Settings] = MaskedLanguageSettings
    shards = False
    shape = ("bert.size", "bert.family", "bert.activation", "bert.vocab_rows")
    modes: Mapping[str, Names] = {"evaluate": ("context", "data", "masked"), "export": ("context",)}
    same: Names = ("context", "data", "bert", "masked")
    logged: Names = ("train_loss", "validation_loss", "validation_accuracy")
    prepare = imported("flashtrain.tasks.masked_language.prepare:prepare")
    plan = imported("flashtrain.tasks.masked_language.plan:plan_masked")
    run_mode = imported("flashtrain.tasks.masked_language.evaluate:run_masked_mode")
    load = imported("flashtrain.tasks.masked_language.evaluate:load_bert_run")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.masked_language.batching import check_masked_step

        settings.check_files()
        check_masked_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        masked = settings.masked
        return {
            "model": settings.named(settings.bert.label),
            "unit": masked.sample_unit,
            "layout": masked.layout,
            "context": settings.context,
            "token_budget": masked.token_budget,
            "optimizer": settings.optimizer.name,
            "steps": settings.trainer.steps,
            "devices": settings.trainer.ranks,
        }

    def report(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        found = row["validation_accuracy"]
        accuracy = "" if found is None else f", accuracy {found:.2%} held out"
        lines = [
            f"finished {row['model']}{losses_words(row)}{accuracy}, "
            f"after {row['tokens']:,} real tokens"
        ]
        if row["seconds_to_target"] is not None:
            lines.append(
                f"target accuracy {row['target_accuracy']:g} reached after {row['steps']} steps "
                f"and {row['seconds_to_target']:.1f} s of training"
            )
        elif row["target_accuracy"] is not None:
            lines.append(
                f"target accuracy {row['target_accuracy']:g} was not reached in "
                f"{row['steps']} steps"
            )
        if row["tokens_per_second"] is not None:
            rates = (
                f"{row['tokens_per_second']:,.0f} real tokens/s, "
                f"{row['rows_per_second']:,.1f} samples/s"
            )
            lines.append(f"{rates}{measured_words(row)}, rows {row['fill']:.1%} full")
        report_finished(folder, *lines, f"{row['seconds']:.0f} s for the whole command")

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        trained, meant = (f"{one.bert.label}, {contexts_words(one)}" for one in (demo, full))
        full_size = f" ({meant})" if meant != trained else ""
        return (
            f"the recipe's small demo instead ({trained}). "
            f"For the recipe in full{full_size}, {where}"
        )
