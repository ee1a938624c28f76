"""Turns command-line words into checked settings, for the command, its sweeps
and the Python API."""

from __future__ import annotations

from collections.abc import Sequence

from flashtrain.command.compose import compose_settings
from flashtrain.command.mode_settings import check_used
from flashtrain.errors import UserError, one_of
from flashtrain.mode import is_of_checkpoint
from flashtrain.settings.aliases import renamed
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings, mode_names


def settings_of(words: Sequence[str]) -> Settings:
    """Return the checked settings of command-line words: the recipe's, or a trained run's,
    with the words on top.

    Raises UserError if a word names no setting, its value cannot be used, or the mode
    does not use the setting.
    """
    line = CommandLine.of(words)
    line.check_given_once()
    given = line.values
    mode = str(given.get("mode", "train"))
    if present := renamed("mode", mode):
        raise UserError(present)
    one_of("mode", mode, mode_names())
    # resume=RUN is enough to go on.
    alone = "recipe" not in given and given.get("resume") not in (None, "auto")
    if is_of_checkpoint(mode) or alone:
        # It imports torch.
        from flashtrain.command.checkpoint_settings import settings_from_checkpoint

        settings = settings_from_checkpoint(line)
    else:
        settings = compose_settings(line)
    check_used(settings, line)
    if settings.mode in ("train", "plan"):
        settings.check_inputs()
    return settings
