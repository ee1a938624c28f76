"""Which settings of a command line change anything, and the line about one that nothing would heed.

Rules say who heeds what (those below, and those that tasks and experiments register): settings or whole groups of
them, the settings under which they are heeded, and that in words. Every rule that names a setting must hold; a setting
without a rule is heeded by all (seed, hardware.accelerator, ...). Only what a command line says is looked at: a
recipe's own lines may hold what one of its modes does not need. `NAME=null` says nothing, and is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import cast

from flashtrain.command.compose import (
    apply_demo,
    check_given_once,
    compose_settings,
    key_of,
    override_keys,
    parse_overrides,
)
from flashtrain.errors import UserError
from flashtrain.registry import component, registered
from flashtrain.settings.groups import MASKS
from flashtrain.settings.settings import Settings
from flashtrain.spec import (
    CHECKPOINT,
    TRAIN,
    Condition,
    Rule,
    does,
    either,
    measures,
    of_weights,
    runs_a_training,
    task_heeds,
    task_of,
    trains,
)

_TRAINING = "what trains (mode=train, mode=lengths)"
_NOT_MEASURED = f"{_TRAINING}; what a benchmark measures is benchmark.*"


def _tests_weights(settings: Settings) -> bool:
    return settings.mode == "evaluate" and settings.checkpoint is None and "weights" in task_of(settings).heeds


def _keeps_masters(settings: Settings) -> bool:
    return settings.hardware.precision == "bf16-true" and not settings.shards_weights


def _falls(settings: Settings) -> bool:
    return any(name != "constant" for name in task_of(settings).in_stages(settings, "schedule", settings.schedule.name))


def _own_component(group: str, *builtin: str) -> Rule:
    """GROUP.options is read by components of a user's program alone."""
    key = "source" if group == "data" else "name"

    def own(settings: Settings) -> bool:
        return getattr(getattr(settings, group), key) not in builtin

    also = "data=hub and " if group == "data" else ""
    by = f"{also}a {group} that a program of your own registered, and not by {group}'s own"
    return Rule(f"{group}.options", own, by)


def _of_trainer(names: str, heeded: Condition) -> Rule:
    return Rule(" ".join(f"trainer.{name}" for name in names.split()), heeded, _NOT_MEASURED)


TRAINING_RULES = (
    # which run, which weights
    Rule("resume", trains(), _TRAINING),
    Rule("checkpoint", does(CHECKPOINT), "mode=evaluate, generate, export, passkey; a training takes weights="),
    Rule(
        "weights",
        either(trains(), _tests_weights, of_weights),
        f"{_TRAINING}; without checkpoint= by mode=evaluate of a language model or a classifier's .safetensors, and by "
        "mode=generate",
    ),
    Rule("target_accuracy", trains("target_accuracy"), "mode=train of recipe=bert, bert-lamb"),
    Rule("export_precision", does("export", task="export_precision"), "mode=export of a classifier"),
    Rule(
        "output",
        lambda settings: settings.checkpoint is None,
        "runs that make a folder; what is made of checkpoint= lies in that run's own folder",
    ),
    # on what
    Rule("context_parallel", either(trains(), measures("context_parallel")), _NOT_MEASURED),
    Rule(
        "context",
        either(does(TRAIN, CHECKPOINT, task="context"), measures("context")),
        "language models and BERT; a benchmark has benchmark.contexts or .seqlens, a classifier sequence.length",
    ),
    Rule(
        "attention",
        either(does(TRAIN, "evaluate", "generate"), measures("attention"), runs_a_training),
        "what trains or evaluates a model; a benchmark has benchmark.implementations",
    ),
    Rule(
        "hardware.precision",
        either(does(TRAIN, CHECKPOINT), runs_a_training, measures("hardware.precision")),
        "what trains or evaluates a model; a benchmark has benchmark.weights or benchmark.dtype",
    ),
    Rule(
        "logger.project logger.run_name logger.group logger.mode",
        lambda settings: "wandb" in settings.logger.kinds,
        "logger=wandb",
    ),
    # how it trains
    Rule("optimizer schedule", either(trains(), measures("optimizer")), f"{_TRAINING}, gpt2-speed and bert-speed"),
    Rule(
        "optimizer.momentum",
        lambda settings: settings.optimizer.name not in ("adamw", "lamb"),
        "optimizer=muon",
    ),
    Rule(
        "optimizer.states",
        lambda settings: settings.optimizer.name == "adamw",
        "optimizer=adamw",
    ),
    Rule("optimizer.master_weights", either(trains(), runs_a_training), _NOT_MEASURED),
    Rule(
        "optimizer.master_weights",
        either(_keeps_masters, runs_a_training),
        "hardware.precision=bf16-true where weights are not sharded",
    ),
    Rule("schedule.minimum_ratio", _falls, "schedule=cosine, linear"),
    Rule("memory", either(does(TRAIN, "evaluate"), measures("memory")), _NOT_MEASURED),
    Rule(
        "memory.loss_chunk",
        task_heeds("memory.loss_chunk"),
        "losses over a vocabulary: language models and recipe=bert",
    ),
    Rule("trainer", either(does(TRAIN, "evaluate"), measures("trainer")), _NOT_MEASURED),
    _of_trainer(
        "steps nodes log_every validate_every checkpoint_every checkpoint max_minutes callbacks",
        either(trains(), runs_a_training),
    ),
    _of_trainer(
        "devices strategy context_way context_layout timeout_seconds",
        either(trains(), runs_a_training, measures("trainer.devices")),
    ),
    _of_trainer("micro_batch tokens_per_step", either(does(TRAIN, "evaluate"), runs_a_training)),
    _of_trainer("compile", either(does(TRAIN, "evaluate"), runs_a_training, measures("trainer.compile"))),
    Rule(
        "trainer.cuda_graphs",
        either(trains("trainer.cuda_graphs"), measures("trainer.cuda_graphs")),
        "trainings of language models, BERT and classifiers",
    ),
    Rule(
        "trainer.tokens_per_step",
        task_heeds("trainer.tokens_per_step"),
        "language models and recipe=bert; classifiers have sequence.batch, fine-tuning finetune.batch",
    ),
    Rule(
        "trainer.timeout_seconds",
        either(lambda settings: settings.strategy == "context", runs_a_training),
        "trainer.strategy=context",
    ),
    _own_component("model", "gpt2", "modern", "plain"),
    _own_component("data", "stdlib", "files", "tokens", "chat"),
    _own_component("mask", *MASKS),
    _own_component("optimizer", "adamw", "lamb", "muon"),
    _own_component("schedule", "constant", "cosine", "linear"),
)


@cache
def rules() -> tuple[Rule, ...]:
    """The framework's rules, and those that tasks and experiments register."""
    registered_rules = (component("rules", name) for name in registered("rules"))
    return (*TRAINING_RULES, *chain.from_iterable(cast(Iterable[Rule], own) for own in registered_rules))


def settings_of(words: Sequence[str]) -> Settings:
    """What these words ask for: composed, or those of a checkpoint with the words on top; checked, each word heeded.

    The words of a job of a sweep or a comparison, which is told its folder, were checked as a whole by its command.
    Raises UserError.
    """
    check_given_once(words)
    keys = override_keys(words)
    settings = None
    if "mode" in keys:
        from flashtrain.command.modes import settings_from_checkpoint  # it imports what a mistake need not wait for

        settings = settings_from_checkpoint(words)
    settings = settings or compose_settings(words)
    if "hydra.run.dir" not in keys:
        check_all_heeded(settings, words)
    return settings


def check_all_heeded(settings: Settings, words: Sequence[str]) -> None:
    """Raise UserError for the first setting that these command-line words name and nothing would heed.

    settings: what the words compose to.
    """
    check_heeded_by_a_job([settings], [words])


def check_heeded_by_a_job(settings: Sequence[Settings], words: Sequence[Sequence[str]]) -> None:
    """The same of a sweep's jobs: a setting need not change every job, but one at least."""
    unheeded = [unheeded_settings(one, own) for one, own in zip(settings, words, strict=True)]
    for name, rule in unheeded[0].items():
        if all(name in other for other in unheeded):
            where = f"recipe={settings[0].recipe} and mode={settings[0].mode}"
            raise UserError(f"{name} changes nothing with {where}. It is heeded by {rule.by}.")


def unheeded_settings(settings: Settings, words: Sequence[str]) -> dict[str, Rule]:
    """The settings that the words name and nothing would heed, each with a rule that says who would.

    The recipe's demo, which may run in its place, may heed what the recipe in full does not.
    """
    overrides = parse_overrides(words)
    named = [key_of(one) for one in overrides if one.is_sweep_override() or one.value() is not None]
    found = {name: rule for name in named if (rule := _broken_rule(name, settings))}
    if found and settings.demo and settings.hardware.demo != "never" and not settings.is_demo:
        try:
            demo = apply_demo(settings, words)
        except UserError:  # it does not go with what the words name, so it would not run in the recipe's place
            return found
        found = {name: rule for name, rule in found.items() if _broken_rule(name, demo)}
    return found


def _broken_rule(name: str, settings: Settings) -> Rule | None:
    return next((rule for rule in rules() if rule.names_setting(name) and not rule.heeded(settings)), None)
