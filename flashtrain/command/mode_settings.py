"""Check that a command names only settings that its mode uses; UserError for
one that it does not use.

Only settings that a command line names are checked: a recipe holds the settings of all its modes.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashtrain.errors import UserError
from flashtrain.mode import modes, work_of
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of

ALWAYS = ("recipe", "mode", "task", "seed", "logger", "hardware")
# Groups, and single settings of groups. A task adds its own (Task.modes); a
# registered mode has Mode.uses.
_SCORING = ("micro_batch", "validation_micro_batch", "tokens_per_step", "compile")
USED = {
    "evaluate": (
        "checkpoint",
        "weights",
        "attention",
        "memory",
        *(f"trainer.{name}" for name in _SCORING),
    ),
    "generate": ("checkpoint", "weights", "attention"),
    "export": ("checkpoint",),
}
# A training uses all but these, and but what other modes have alone.
NOT_TRAINED = dict.fromkeys(("export", "export_precision"), "it is of mode=export")
NOT_TRAINED["checkpoint"] = "a training takes weights= or resume="


def check_used(settings: Settings, line: CommandLine) -> None:
    """Raise UserError for the first setting that this command line names and its mode does not use.

    Also raise it if the recipe of a benchmark is to be trained or evaluated. `settings` are those
    that the line composes to.
    """
    work, task = work_of(settings), task_of(settings)
    measuring = next(
        (name for name, one in modes().items() if one.measures and one.is_requested(settings)), work
    )
    if work != measuring:
        raise UserError(
            f"mode={work}: recipe={settings.recipe} is a benchmark and trains nothing. "
            f"Use mode={measuring} or plan."
        )
    mode = modes().get(work)
    used = None if mode is None else mode.uses(settings)
    if work in USED:
        used = (*USED[work], *task.modes[work])
    of_others = {
        own: f"it is of mode={name}"
        for name, one in modes().items()
        if name != work
        for own in one.own
        if mode is None or own not in mode.shared
    }
    others = NOT_TRAINED | of_others
    # What a trained model has as it was trained.
    trained = {"checkpoint": (*task.shape, *task.trained), "weights": task.shape}
    start = next((one for one in trained if getattr(settings, one) is not None), "")
    for name in line.by_name:
        if name.startswith("hydra") or _is_of(name, ALWAYS):
            continue
        if used is None:
            why = next((why for other, why in others.items() if _is_of(name, (other,))), None)
        else:
            why = None if _is_of(name, used) else f"it uses {', '.join(sorted(used))}"
        if why is not None:
            raise UserError(f"{name} is not used by mode={work}: {why}.")
        if _is_of(name, trained.get(start, ())):
            raise UserError(
                f"{name} is not used with {start}=...: "
                f"the model has the shape that it was trained with. Remove {name}."
            )


def _is_of(name: str, names: Iterable[str]) -> bool:
    """Return whether `name` is one of `names`, or a setting inside a group that is."""
    return any(name == one or name.startswith(f"{one}.") for one in names)
