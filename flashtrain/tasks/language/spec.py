"""task=language_model: decoders that predict the next token (recipe=gpt2, gpt2-long)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from flashtrain.errors import UserError, one_of
from flashtrain.mode import contexts_words
from flashtrain.registry import registered
from flashtrain.settings import options
from flashtrain.settings.model import LAYERS, SHAPE
from flashtrain.settings.settings import Settings
from flashtrain.spec import Names, Task, imported, losses_words, measured_words, report_finished
from flashtrain.tasks.language.settings import LanguageSettings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class LanguageTask(Task):
    """task=language_model: a decoder trained on text to predict the next token."""

    settings = LanguageSettings
    plans_epochs = True
    used = ("context", "model", "data", "mask")
    same = (*used, "stages")
    logged = ("train_loss", "validation_loss")
    modes: Mapping[str, Names] = {
        "evaluate": used,
        "generate": (*used, "generate", "prompt"),
        "export": (*used, "export"),
    }
    shape = ("model.size", *(f"model.{name}" for name in SHAPE), "model.positions")
    trained = tuple(
        f"model.{name}" for name in ("name", "dropout", "vocab_rows", "options", *LAYERS)
    )
    prepare = imported("flashtrain.tasks.language.prepare:prepare")
    run_mode = imported("flashtrain.tasks.language.evaluate:run_language_mode")
    load = imported("flashtrain.tasks.language.evaluate:read_model")
    of_checkpoint = imported("flashtrain.tasks.language.stages:of_stage")
    trainings = imported("flashtrain.tasks.language.stages:trainings")

    def check(self, settings: Settings) -> None:
        super().check(settings)
        one_of("mask", settings.mask.name, {*get_args(options.Mask), *registered("mask")})

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        if settings.stages:
            from flashtrain.tasks.language.stages import check_stages

            return check_stages(settings, given)
        settings.check_files()
        settings.check_step()
        if settings.weights is None and (
            settings.sharding is not None or settings.model.own_layers
        ):
            from flashtrain.tasks.context_run import check_shape
            from flashtrain.tasks.decoders import check_layers

            shape = check_layers(settings.model, settings.mask, settings.context)
            # Models that start from weights, and registered ones, are checked once built.
            if shape is not None:
                check_shape(settings.sharding, shape)
        prefix = settings.mask.prefix
        if settings.mask.name == "prefix" and prefix is not None and prefix >= settings.context:
            raise UserError(
                f"mask.prefix={prefix} leaves none of context={settings.context} tokens to "
                "predict: tokens of the prefix are not scored. Expected at most "
                f"{settings.context - 1}."
            )

    def suit_weights(self, settings: Settings, given: Collection[str]) -> Sequence[str]:
        if settings.weights is None and settings.model.path is None:
            return ()
        from flashtrain.tasks.language.weights_settings import suit_to_weights

        return suit_to_weights(settings, given)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.language.plan import plan_language

        if settings.trainer.epochs is None:
            return plan_language(settings, hardware)
        from flashtrain.tasks.language.prepare import read_data

        return plan_language(settings, hardware, read_data(settings, hardware)[1])

    def columns(self, settings: Settings) -> dict[str, Any]:
        if settings.stages:
            from flashtrain.tasks.language.stages import stages_of

            rows = [self.columns(one.settings) for one in stages_of(settings)]
            return rows[-1] | {name: sum(one[name] for one in rows) for name in ("steps", "tokens")}
        return {
            "model": settings.named(settings.model.label),
            "context": settings.context,
            **({} if settings.mask_label == "causal" else {"mask": settings.mask_label}),
            "batch": settings.samples_per_step,
            "steps": settings.trainer.steps,
            "tokens": settings.trainer.steps * settings.trainer.tokens_per_step,
            "devices": settings.trainer.ranks,
        }

    def report(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.folders.run_folder import SAMPLE
        from flashtrain.tasks.language.stages import stage_lines

        prompt = settings.prompt or settings.data.first_words
        generate = f'mode=generate checkpoint={folder} prompt="{prompt}"'
        rate = row["tokens_per_second"]
        speed = "" if rate is None else f"{rate:,.0f} tokens/s{measured_words(row)}, "
        report_finished(
            folder,
            f"finished {row['model']}{losses_words(row)}, after {row['tokens']:,} tokens",
            f"{speed}{row['seconds']:.0f} s for the whole command",
            *stage_lines(settings, folder),
            then=generate if (folder / SAMPLE).is_file() else None,
        )

    def suit_demo(self, demo: Settings, given: Collection[str]) -> None:
        if "trainer.tokens_per_step" not in given:
            # The demo's step is for its own context: of another one it is whole samples too.
            demo.trainer.tokens_per_step = demo.context * max(
                1, -(-demo.trainer.tokens_per_step // demo.context)
            )

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        tokens = f"tokenizer {demo.data.tokenizer}"
        if demo.data.source == "tokens":
            tokens = "the file's own tokens"
        trained = (
            f"the recipe's small demo model instead ({demo.model.label}, {tokens}, "
            f"{contexts_words(demo)})"
        )
        if full.model.name == "huggingface" and full.model.path is None:
            return (
                f"{trained}, with random weights. "
                "To train a model of your own, set model.path=FOLDER_OR_HUB_NAME."
            )
        return (
            f"{trained}. "
            f"For the recipe in full ({full.model.label}, {contexts_words(full)}), {where}"
        )
