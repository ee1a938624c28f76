"""Who heeds what a run of any task is told: its mode, its weights, how it trains, on what, and how it is logged."""

from __future__ import annotations

from flashtrain.command.heeded.conditions import (
    CLASSES,
    LANGUAGE,
    MASKED,
    OF_A_CHECKPOINT,
    TRAININGS,
    TUNING,
    Condition,
    Rule,
    does,
    either,
    in_stages,
    measures,
    runs_the_command,
    trains,
    unless,
)
from flashtrain.settings.settings import Settings

_TRAINING = "what trains (mode=train, mode=lengths)"
_NOT_MEASURED = f"{_TRAINING}; what a benchmark measures is benchmark.*"


def _tests_weights(settings: Settings) -> bool:
    return settings.task == CLASSES and settings.mode == "evaluate" and settings.checkpoint is None


def _keeps_masters(settings: Settings) -> bool:
    return settings.hardware.precision == "bf16-true" and not settings.shards_weights


def _falls(settings: Settings) -> bool:
    return any(name != "constant" for name in in_stages(settings, "schedule", settings.schedule.name))


def _bert_of_context(settings: Settings) -> bool:
    return settings.benchmark.name == "bert" and not settings.benchmark.contexts


def _own_component(group: str, *builtin: str) -> Rule:
    """GROUP.options is read by components of a user's program alone."""
    key = "source" if group == "data" else "name"

    def own(settings: Settings) -> bool:
        return getattr(getattr(settings, group), key) not in builtin

    return Rule(f"{group}.options", own, f"a {group} that a program of your own registered, and not by {group}'s own")


def _of_trainer(names: str, heeded: Condition) -> Rule:
    return Rule(" ".join(f"trainer.{name}" for name in names.split()), heeded, _NOT_MEASURED)


TRAINING_RULES = (
    # which run, which weights
    Rule("resume", trains(), _TRAINING),
    Rule("checkpoint", does(*OF_A_CHECKPOINT), "mode=evaluate, generate, export, passkey; a training takes weights="),
    Rule(
        "weights",
        either(trains(), _tests_weights),
        f"{_TRAINING}, and by mode=evaluate without checkpoint= of a classifier's .safetensors",
    ),
    Rule("target_accuracy", trains(MASKED), "mode=train of recipe=bert, bert-lamb"),
    Rule("export_precision", does("export", task=(CLASSES,)), "mode=export of a classifier"),
    Rule(
        "output",
        lambda settings: settings.checkpoint is None,
        "runs that make a folder; what is made of checkpoint= lies in that run's own folder",
    ),
    # on what
    Rule("context_parallel", trains(), _NOT_MEASURED),
    Rule(
        "context",
        either(does(*TRAININGS, *OF_A_CHECKPOINT, task=(LANGUAGE, MASKED, TUNING)), _bert_of_context),
        "language models and BERT; a benchmark has benchmark.contexts or .seqlens, a classifier sequence.length",
    ),
    Rule(
        "attention",
        either(does(*TRAININGS, "evaluate", "generate", "passkey"), runs_the_command),
        "what trains or evaluates a model; a benchmark has benchmark.implementations",
    ),
    Rule(
        "hardware.precision",
        either(does(*TRAININGS, *OF_A_CHECKPOINT), runs_the_command),
        "what trains or evaluates a model; a benchmark has benchmark.weights or benchmark.dtype",
    ),
    Rule(
        "logger.project logger.run_name logger.group logger.mode",
        lambda settings: settings.logger.name == "wandb",
        "logger=wandb",
    ),
    # how it trains
    Rule("optimizer schedule", either(trains(), measures("step", "bert")), f"{_TRAINING}, gpt2-speed and bert-speed"),
    Rule(
        "optimizer.momentum",
        lambda settings: settings.optimizer.name not in ("adamw", "lamb"),
        "optimizer=muon",
    ),
    Rule("optimizer.master_weights", either(trains(), runs_the_command), _NOT_MEASURED),
    Rule(
        "optimizer.master_weights",
        either(_keeps_masters, runs_the_command),
        "hardware.precision=bf16-true where weights are not sharded",
    ),
    Rule("schedule.minimum_ratio", _falls, "schedule=cosine, linear"),
    Rule("memory", either(does(*TRAININGS, "evaluate"), measures("step")), _NOT_MEASURED),
    Rule(
        "memory.loss_chunk",
        unless(trains(LANGUAGE, MASKED), lambda settings: settings.task in (LANGUAGE, MASKED)),
        "losses over a vocabulary: language models and recipe=bert",
    ),
    Rule("trainer", either(does(*TRAININGS, "evaluate"), measures("step", "bert")), _NOT_MEASURED),
    _of_trainer(
        "steps devices nodes strategy context_way context_layout timeout_seconds log_every validate_every "
        "checkpoint_every max_minutes callbacks",
        either(trains(), runs_the_command),
    ),
    _of_trainer("micro_batch compile tokens_per_step", either(does(*TRAININGS, "evaluate"), runs_the_command)),
    Rule(
        "trainer.cuda_graphs",
        either(trains(LANGUAGE, CLASSES, MASKED), measures("step", "bert")),
        "trainings of language models, BERT and classifiers",
    ),
    Rule(
        "trainer.tokens_per_step",
        lambda settings: settings.task in (LANGUAGE, MASKED),
        "language models and recipe=bert; classifiers have sequence.batch, fine-tuning finetune.batch",
    ),
    Rule(
        "trainer.timeout_seconds",
        either(lambda settings: settings.strategy == "context", runs_the_command),
        "trainer.strategy=context",
    ),
    _own_component("model", "gpt2", "modern", "plain"),
    _own_component("data", "stdlib", "files", "hub"),
    _own_component("optimizer", "adamw", "lamb", "muon"),
    _own_component("schedule", "constant", "cosine", "linear"),
)
