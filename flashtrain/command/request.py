"""Turns command-line words into checked settings, for the command, its sweeps and the Python API."""

from __future__ import annotations

from collections.abc import Sequence

from flashtrain.command.compose import check_given_once, compose_settings, given_values
from flashtrain.command.mode_settings import check_used
from flashtrain.errors import UserError, one_of
from flashtrain.mode import is_of_checkpoint
from flashtrain.settings.aliases import renamed
from flashtrain.settings.settings import Settings, mode_names


def settings_of(words: Sequence[str]) -> Settings:
    """Return the checked settings of command-line words: the recipe's, or a trained run's, with the words on top.

    Raises UserError if a word names no setting, its value cannot be used, or the mode does not use the setting.
    """
    check_given_once(words)
    given = given_values(words)
    mode = str(given.get("mode", "train"))
    if line := renamed("mode", mode):
        raise UserError(line)
    one_of("mode", mode, mode_names())
    alone = "recipe" not in given and given.get("resume") not in (None, "auto")  # resume=RUN is enough to go on
    if is_of_checkpoint(mode) or alone:
        from flashtrain.command.checkpoint_settings import settings_from_checkpoint  # it imports torch

        settings = settings_from_checkpoint(words)
    else:
        settings = compose_settings(words)
    check_used(settings, words)
    if settings.mode in ("train", "plan"):
        settings.check_inputs()
    return settings
