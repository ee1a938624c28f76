"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert, bert-lamb)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import Task, TrainedModel, TrainingSetup, contexts_words, measured_words, say_finished
from flashtrain.tasks.masked_language.settings import MaskedLanguageSettings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class MaskedTask(Task):
    """BERT on masked text."""

    settings: type[Settings] = MaskedLanguageSettings
    shards = False
    shape = "bert.size bert.family bert.activation bert.vocab_rows"
    modes: Mapping[str, str] = {"evaluate": "context data masked bert.residual", "export": "context"}
    same: tuple[str, ...] = ("context", "data", "bert", "masked")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.masked_language.build import check_masked_step

        check_masked_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        asked = settings.masked
        return {
            "model": settings.named(settings.bert.label),
            "unit": asked.unit,
            "layout": asked.layout,
            "context": settings.context,
            "token_budget": asked.token_budget,
            "optimizer": settings.optimizer.name,
            "steps": settings.trainer.steps,
            "devices": settings.trainer.ranks,
        }

    def prepare(self, settings: Settings, hardware: Hardware) -> TrainingSetup:
        from flashtrain.tasks.masked_language.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.masked_language.prepare import plan_masked

        return plan_masked(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        held_out = "" if row["validation_loss"] is None else f" (held-out {row['validation_loss']:.3f})"
        accuracy = "" if row["validation_accuracy"] is None else f", accuracy {row['validation_accuracy']:.2%} held out"
        first = "?" if row["train_loss_first"] is None else f"{row['train_loss_first']:.3f}"
        loss = "" if row["train_loss"] is None else f": loss {first} -> {row['train_loss']:.3f}"
        lines = [f"finished {row['model']}{loss}{held_out}{accuracy}, after {row['tokens']:,} real tokens"]
        if row["seconds_to_target"] is not None:
            lines.append(
                f"target accuracy {row['target_accuracy']:g} reached after {row['steps']} steps and "
                f"{row['seconds_to_target']:.1f} s of training"
            )
        elif row["target_accuracy"] is not None:
            lines.append(f"target accuracy {row['target_accuracy']:g} was not reached in {row['steps']} steps")
        if row["tokens_per_second"] is not None:
            rates = f"{row['tokens_per_second']:,.0f} real tokens/s, {row['rows_per_second']:,.1f} samples/s"
            lines.append(f"{rates}{measured_words(row)}, rows {row['fill']:.1%} full")
        say_finished(folder, *lines, f"{row['seconds']:.0f} s for the whole command")

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain.tasks.masked_language.prepare import run_masked_mode

        return run_masked_mode(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> TrainedModel:
        from flashtrain.tasks.masked_language.build import read_bert
        from flashtrain.tasks.masked_language.prepare import trained_bert

        saved = read_bert(str(settings.checkpoint))
        model = trained_bert(saved, settings, hardware)
        return TrainedModel(model, saved.tokenizer, settings, saved.folder, saved.path, saved.step)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        trained, meant = (f"{one.bert.label}, {contexts_words(one)}" for one in (demo, full))
        full_size = f" ({meant})" if meant != trained else ""
        return f"training the recipe's small demo instead ({trained}). For the recipe in full{full_size}, {where}"
