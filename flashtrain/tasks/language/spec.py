"""task=language_model: decoders that predict the next token (recipe=gpt2, gpt2-long, context-extension)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.heeded import (
    CHECKPOINT,
    OF_TOKENS,
    TRAIN,
    Rule,
    does,
    either,
    measures,
    measures_nothing,
    no_weights,
    runs_a_training,
    task_heeds,
    trains,
    unless,
)
from flashtrain.settings.settings import Settings
from flashtrain.spec import Prepared, Task, contexts_words, measured_words, mode_of, say_finished

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class LanguageTask(Task):
    """Next-token training of a registered model on text."""

    heeds = ("model", "data", "context", "context_parallel", *OF_TOKENS)

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        settings.check_step()
        if settings.weights is not None and not {"model", "model.name"}.isdisjoint(given):
            from flashtrain.tasks.language.trained import check_family

            check_family(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        return {
            "model": settings.named(settings.model.label),
            "context": settings.context,
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

    def run_mode(self, settings: Settings, hardware: Hardware) -> int:
        from flashtrain.tasks.language.evaluate import run_language_mode

        mode = mode_of(settings)
        return run_language_mode(settings, hardware) if mode is None else mode.run_checkpoint(settings, hardware)

    def fit_demo(self, demo: Settings, given: Collection[str]) -> None:
        if "trainer.tokens_per_step" not in given:
            # The demo's step is for its own context: of another one it is whole samples too.
            demo.trainer.tokens_per_step = demo.context * max(1, -(-demo.trainer.tokens_per_step // demo.context))

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        trained = f"{demo.data.tokenizer} as tokens, {contexts_words(demo)}"
        return (
            f"training the recipe's small demo model instead ({trained}). For the recipe in full "
            f"({full.model.label}, {contexts_words(full)}), {where}"
        )


def _transformers(settings: Settings) -> bool:
    return settings.model.name == "huggingface"


RULES = (
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
        either(trains("model"), measures("model")),
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
        "data.document_mask data.validation_tokens data.split_context",
        task_heeds("model"),
        "language models; BERT has masked.* and finetune.*",
    ),
    Rule(
        "prompt generate",
        either(trains("model"), does("generate"), runs_a_training),
        "mode=generate and the sample at the end of a language model's training",
    ),
)
