"""A command line's words, parsed once by Hydra's grammar, and values written in that grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from flashtrain.errors import UserError
from flashtrain.files.yaml_files import literal

# What starts the command: a program that calls flashtrain.main() is named here by it.
program = "python -m flashtrain"
FOLDER = "hydra.run.dir"  # names a run's folder: of a job of a sweep, say
_PLAIN = re.compile(r"\.{0,2}[A-Za-z_/][\w/.-]*", re.ASCII)  # a text that Hydra reads as it is
_NO_TEXT = ("null", "true", "false", "nan", "inf")


class CommandLine(tuple[str, ...]):
    """The words of a command line (key=value), parsed once, when a property first needs it.

    The properties raise UserError for a word that is not key=value.
    """

    @classmethod
    def of(cls, words: Iterable[str]) -> CommandLine:
        """Return the words as a CommandLine; a given CommandLine is returned itself, so that it is
        not parsed again."""
        return words if isinstance(words, CommandLine) else cls(words)

    @cached_property
    def overrides(self) -> list[Override]:
        """Hydra's Override of each word, in the words' order."""
        try:
            return OverridesParser.create().parse_overrides(list(self))
        except OverrideParseException as error:
            raise UserError(
                f"unexpected argument '{error.override}'. "
                "Settings are name=value, for example recipe=gpt2 mode=train."
            ) from error

    @cached_property
    def by_name(self) -> dict[str, Override]:
        """The overrides by the name of their setting or group, without +, ++ or ~."""
        return {_name(override): override for override in self.overrides}

    @property
    def values(self) -> dict[str, Any]:
        """The values by the name of their setting or group, without words that list several values
        (a sweep)."""
        return {
            name: one.value() for name, one in self.by_name.items() if not one.is_sweep_override()
        }

    def check_given_once(self) -> None:
        """Raise UserError for a setting or group that is given twice: Hydra would take the last.

        Hydra's own settings may come twice: Lightning adds a run's folder when
        it starts further ranks.
        """
        first: dict[str, str] = {}
        for word, name in zip(self, map(_name, self.overrides), strict=True):
            if name in first and name.split(".")[0].split("/")[0] != "hydra":
                raise UserError(
                    f"{name} is given twice, as {first[name]} and as {word}. "
                    f"Give it once, or several values as a sweep: -m {name}=A,B."
                )
            first[name] = word


def _name(override: Override) -> str:
    return override.get_key_element().lstrip("+~")


def as_value(text: str) -> str:
    """Return a text as a value in Hydra's grammar, in quotes only if Hydra would
    otherwise read it differently."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT else quoted(text)


def quoted(text: str) -> str:
    """Return a text as a value in Hydra's grammar, in quotes."""
    text = literal(text)  # OmegaConf would look for a setting of that name
    # In Hydra's quoted text a backslash escapes only before a quote, the closing one included.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
