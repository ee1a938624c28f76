"""task=language_model: decoders that predict the next token (recipe=gpt2, gpt2-long, context-extension)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError, one_of
from flashtrain.registry import registered
from flashtrain.settings.groups import MASKS
from flashtrain.settings.settings import Settings
from flashtrain.spec import (
    CHECKPOINT,
    OF_TOKENS,
    TRAIN,
    Condition,
    Loaded,
    Prepared,
    Rule,
    Task,
    contexts_words,
    does,
    either,
    measured_words,
    measures,
    measures_nothing,
    mode_of,
    no_weights,
    of_weights,
    runs_a_training,
    say_finished,
    task_heeds,
    trains,
    unless,
)

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class LanguageTask(Task):
    """Next-token training of a registered model on text."""

    heeds = ("model", "data", "data.train_on", "mask", "context", "context_parallel", *OF_TOKENS)
    groups = ("mask",)

    def check(self, settings: Settings) -> None:
        super().check(settings)
        if settings.mask.name not in MASKS:
            one_of("mask", settings.mask.name, dict.fromkeys((*MASKS, *registered("mask"))))

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        settings.check_step()
        prefix = settings.mask.prefix
        if settings.mask.name == "prefix" and prefix is not None and prefix >= settings.context:
            raise UserError(
                f"mask.prefix={prefix} leaves none of context={settings.context} tokens to predict: what the prefix "
                f"sees is not scored. Possible: at most {settings.context - 1}."
            )

    def fit_weights(self, settings: Settings, given: Collection[str]) -> Sequence[str]:
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

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
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

    def load(self, settings: Settings, hardware: Hardware) -> Loaded:
        from flashtrain.tasks.language.evaluate import read_model

        return Loaded(settings=settings, **vars(read_model(settings, hardware)))

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


def _masked_by(name: str) -> Condition:
    return lambda settings: settings.mask.name == name


def _transformers(settings: Settings) -> bool:
    return settings.model.name == "huggingface"


RULES = (
    Rule("mask", either(does(TRAIN, CHECKPOINT, task="mask"), measures("mask")), "language models"),
    Rule(
        "mask",
        lambda settings: not _transformers(settings) or settings.mask.name in ("causal", "document"),
        "flashtrain's own decoders; a transformers model has masks of its own, and mask=document",
    ),
    Rule("mask.window", _masked_by("window"), "mask=window"),
    Rule("mask.chunk", _masked_by("chunked"), "mask=chunked"),
    Rule("mask.prefix", _masked_by("prefix"), "mask=prefix"),
    Rule("model.path model.config model.adapter", _transformers, "model=huggingface (recipe=hf)"),
    Rule(
        "model.adapter_rank model.adapter_alpha model.adapter_targets model.adapter_dropout model.quantize",
        lambda settings: settings.model.adapter is not None,
        "model.adapter=lora",
    ),
    Rule(
        "model.size model.positions model.dropout model.vocab_rows model.interpolate_positions",
        lambda settings: not _transformers(settings),
        "flashtrain's own decoders; a transformers model is as its configuration says (model.options)",
    ),
    Rule(
        "model",
        either(does(TRAIN, CHECKPOINT, task="model"), measures("model")),
        "language models; BERT has bert.*, a classifier classifier.*",
    ),
    Rule(
        "model.name model.size model.positions model.dropout model.vocab_rows model.options",
        either(trains("model"), measures("model"), of_weights),
        "trainings; a checkpoint's model is as it was trained",
    ),
    Rule(
        "model.size model.positions",
        unless(measures("model"), no_weights),
        "trainings without weights=, which have a size and positions of their own",
    ),
    Rule(
        "model.size",
        either(measures_nothing, runs_a_training),
        "trainings; here it is benchmark.models=[124m,355m]",
    ),
    Rule(
        "data",
        either(does(TRAIN, CHECKPOINT, task="data"), measures("data")),
        "language models and BERT; a classifier has sequence.*",
    ),
    Rule(
        "data.document_mask data.validation_tokens data.split_context data.begin_of_text",
        task_heeds("model"),
        "language models; BERT has masked.* and finetune.*",
    ),
    Rule(
        "data.split_context",
        lambda settings: settings.data.source != "chat",
        "data=stdlib, files, hub; of data=chat whole conversations are held out, whatever the context",
    ),
    Rule(
        "prompt generate",
        either(trains("model"), does("generate"), runs_a_training),
        "mode=generate and the sample at the end of a language model's training",
    ),
)
