"""Which settings of a command line change anything, and the line about one that nothing would heed.

Rules say who heeds what (training_rules.py, task_rules.py, and those that are registered): settings or whole groups
of them, the settings under which they are heeded, and that in words. Every rule that names a setting must hold; a
setting without a rule is heeded by all (seed, hardware.accelerator, ...). Only what a command line says is looked at:
a recipe's own lines may hold what one of its modes does not need. `NAME=null` says nothing, and is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import cast

from flashtrain.command.compose import apply_demo, key_of, parse_overrides
from flashtrain.command.heeded.conditions import Rule
from flashtrain.command.heeded.task_rules import TASK_RULES
from flashtrain.command.heeded.training_rules import TRAINING_RULES
from flashtrain.errors import UserError
from flashtrain.registry import component, registered
from flashtrain.settings.settings import Settings


@cache
def rules() -> tuple[Rule, ...]:
    """The framework's rules, and those that tasks and experiments register."""
    registered_rules = (component("rules", name) for name in registered("rules"))
    return (*TRAINING_RULES, *TASK_RULES, *chain.from_iterable(cast(Iterable[Rule], own) for own in registered_rules))


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
        demo = apply_demo(settings, words)
        found = {name: rule for name, rule in found.items() if _broken_rule(name, demo)}
    return found


def _broken_rule(name: str, settings: Settings) -> Rule | None:
    return next((rule for rule in rules() if rule.names_setting(name) and not rule.heeded(settings)), None)
