"""task=language_model: decoders that predict the next token (recipe=gpt2, gpt2-long, context-extension)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from flashtrain.errors import UserError, one_of
from flashtrain.registry import registered
from flashtrain.settings import options
from flashtrain.settings.settings import Settings
from flashtrain.spec import Task, TrainedModel, TrainingSetup, contexts_words, measured_words, mode_of, say_finished
from flashtrain.tasks.language.settings import LanguageSettings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class LanguageTask(Task):
    """Next-token training of a registered model on text."""

    settings = LanguageSettings
    modes: Mapping[str, str] = {
        "evaluate": "context data mask model",
        "generate": "context data mask model generate prompt",
        "export": "context data mask model",
    }
    shape = "model.size model.positions"
    trained = "model.name model.dropout model.vocab_rows model.options"
    same = ("context", "model", "data", "mask")

    def check(self, settings: Settings) -> None:
        super().check(settings)
        one_of("mask", settings.mask.name, {*get_args(options.Mask), *registered("mask")})

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        settings.check_step()
        prefix = settings.mask.prefix
        if settings.mask.name == "prefix" and prefix is not None and prefix >= settings.context:
            raise UserError(
                f"mask.prefix={prefix} leaves none of context={settings.context} tokens to predict: what the "
                f"prefix sees is not scored. Expected at most {settings.context - 1}."
            )

    def fit_weights(self, settings: Settings, given: Collection[str]) -> Sequence[str]:
        if settings.weights is None and settings.model.path is None:
            return ()
        from flashtrain.tasks.language.exports import take_export
        from flashtrain.tasks.language.trained import check_family, fit_context, fit_to_run

        take_export(settings)
        if settings.weights is None:
            return fit_context(settings, given)
        if not {"model", "model.name"}.isdisjoint(given):
            check_family(settings)
        return [*fit_to_run(settings, given), *fit_context(settings, given)]

    def columns(self, settings: Settings) -> dict[str, Any]:
        return {
            "model": settings.named(settings.model.label),
            "context": settings.context,
            **({} if settings.mask_label == "causal" else {"mask": settings.mask_label}),
            "batch": settings.samples_per_step,
            "steps": settings.trainer.steps,
            "tokens": settings.trainer.steps * settings.trainer.tokens_per_step,
            "devices": settings.trainer.ranks,
        }

    def prepare(self, settings: Settings, hardware: Hardware) -> TrainingSetup:
        from flashtrain.tasks.language.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.language.prepare import plan_language

        return plan_language(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        held_out = "" if row["validation_loss"] is None else f" (held-out {row['validation_loss']:.3f})"
        first = "" if row["train_loss_first"] is None else f"{row['train_loss_first']:.3f} -> "
        # A run that was ended after its last step, and resumed, trains no more.
        loss = "" if row["train_loss"] is None else f" loss {first}{row['train_loss']:.3f}"
        prompt = settings.prompt or settings.data.first_words
        rate = row["tokens_per_second"]
        speed = "" if rate is None else f"{rate:,.0f} tokens/s{measured_words(row)}, "
        say_finished(
            folder,
            f"finished {row['model']}:{loss}{held_out} after {row['tokens']:,} tokens",
            f"{speed}{row['seconds']:.0f} s for the whole command",
            then=f'mode=generate checkpoint={folder} prompt="{prompt}"',
        )

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain.tasks.language.evaluate import run_language_mode

        mode = mode_of(settings)
        return run_language_mode(settings, hardware) if mode is None else mode.run_checkpoint(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> TrainedModel:
        from flashtrain.tasks.language.evaluate import read_model

        return TrainedModel(settings=settings, **vars(read_model(settings, hardware)))

    def fit_demo(self, demo: Settings, given: Collection[str]) -> None:
        if "trainer.tokens_per_step" not in given:
            # The demo's step is for its own context: of another one it is whole samples too.
            demo.trainer.tokens_per_step = demo.context * max(1, -(-demo.trainer.tokens_per_step // demo.context))

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        tokens = "the file's own tokens" if demo.data.source == "tokens" else f"{demo.data.tokenizer} as tokens"
        trained = f"{tokens}, {contexts_words(demo)}"
        return (
            f"training the recipe's small demo model instead ({trained}). For the recipe in full "
            f"({full.model.label}, {contexts_words(full)}), {where}"
        )
