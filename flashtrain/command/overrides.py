"""Translate what users write on the command line for Hydra: names in any case, 1e6 as
1000000, paths in quotes.

Mistakes in the form of a word are found here, mistakes in the settings that it names in compose.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_origin

from flashtrain.command.compose import CHOOSES, REGISTERED
from flashtrain.errors import UserError, unknown
from flashtrain.files.shipped import conf_folder, recipe_files
from flashtrain.registry import registered
from flashtrain.settings.command_line import FOLDER, as_value
from flashtrain.settings.options import DecoderName, Logger
from flashtrain.settings.schema import all_settings, meant
from flashtrain.settings.settings import mode_names

# Of Hydra's flags those that are used: a sweep's is -m, and --cfg job prints the settings.
# --slurm is ours.
FLAGS = ["-h", "--help", "--version", "-m", "--multirun"]
FLAGS += ["-c", "--cfg", "-p", "--package", "--resolve", "--slurm"]
# What names a folder or a dataset, which the group itself does not.
PLACES = {
    "model": "model.path={0} with recipe=hf or sft",
    "data": "data=files data.path={0} or data=hub data.name={0}",
}
_FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)=(?P<value>.*)", re.DOTALL)
_POWER_OF_TEN = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")
_BETWEEN_COMMAS = re.compile(r"""'(\\.|[^'\\])*'(?=,|$)|"(\\.|[^"\\])*"(?=,|$)|[^,]+""")
# Hydra's own words for several values.
_SWEEP = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag)\(")
_GPUS = re.compile(r"^(hardware\.plan_for=)([1-9]\d*)x(?=\w)", re.IGNORECASE)  # of 8xh100
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
# What YAML takes for no text.
_NO_NAME = re.compile(r"null|true|false|nan|inf|[-+.\d\[].*|", re.IGNORECASE)


def plain_words(words: Sequence[str]) -> list[str]:
    """Translate command-line arguments for Hydra: recipe=GPT2 to recipe=gpt2, 1e6 to
    1000000, paths into quotes.

    Raises UserError if a word is neither a flag of Hydra's nor a setting, or a
    group's value is no name.
    """
    for flag, _, value in (word.partition("=") for word in words if word.startswith("-")):
        if flag not in FLAGS:
            name, known = flag.lstrip("-").replace("-", "_"), (one for one, _, _ in all_settings())
            hint = meant(name, dict.fromkeys(known), value or None)
            hint = hint or "The flags are --help, --version, --multirun, --cfg job and --slurm."
            raise UserError(f"unknown flag {flag}: settings are name=value, without dashes. {hint}")
    devices = [f"trainer.devices={gpus[2]}" for word in words if (gpus := _GPUS.match(word))]
    words = [
        *(_GPUS.sub(r"\1", word) for word in words),
        *(word for word in devices if word not in words),
    ]
    models = [
        word.partition("=")[2].lower()
        for word in words
        if word.startswith(("model=", "model.name="))
    ]
    own = set(models) - {*get_args(DecoderName)}
    kept = ("-", "model.size=") if own else ("-",)  # a model of one's own has sizes of its own
    sweep = "-m" in words or "--multirun" in words
    return [word if word.startswith(kept) else _plain(word, sweep) for word in words]


def _plain(word: str, sweep: bool) -> str:
    form = _FORM.fullmatch(word)
    if form is None:
        return word
    sign, key, value = form["sign"] or "", form["key"].strip(), form["value"]
    if not key:
        raise UserError(
            f"unexpected argument '{word}'. "
            "Settings are name=value, for example recipe=gpt2 mode=train."
        )
    if key != "prompt" and ("\n" in value or "\r" in value):
        raise UserError(f"{key}= has a line break in its value. Expected one line.")
    if key in ("logger", "logger.name") and re.fullmatch(r"\[[\w, ]+\]", value):
        several = ",".join(
            _as_written(one, get_args(Logger)).strip() for one in value[1:-1].split(",")
        )
        return f"{sign}logger.name='{several}'"
    choices = _choices(key)
    if key in REGISTERED and value not in (choices or ()) and value in registered(REGISTERED[key]):
        # Of the user's own program: it has no file in conf/
        return f"{sign}{key}.{CHOOSES.get(key, 'name')}={value}"
    if key in PLACES and "/" in value:
        raise UserError(f"unknown {key} '{value}'. Use {PLACES[key].format(value)}.")
    if choices is not None and sign != "~" and ("," not in value or value.startswith("[")):
        if _NO_NAME.fullmatch(value) and value not in choices:
            raise unknown(key, value, choices)
        value = _as_written(value, choices)
    elif _POWER_OF_TEN.search(value) and key in _of_type(int) | _of_type(list[int]):
        value = _POWER_OF_TEN.sub(lambda number: _whole(number[0]), value)
    elif _NAME.fullmatch(value) and not _NO_NAME.fullmatch(value):
        pass  # a text as it is, whatever the setting
    elif choices is None and (key in _of_type(str) or key == FOLDER) and sign != "~":
        names = mode_names() if key == "mode" else _options().get(key, ())
        value = ",".join(_as_written(one, names) for one in value.split(","))
        if all(one in names for one in value.split(",")):
            pass  # without -m Hydra says how several names are given
        elif not sweep or key == "prompt":
            value = _as_typed(key, value)
        elif not _SWEEP.match(value):
            value = _BETWEEN_COMMAS.sub(lambda one: _as_typed(key, one[0]), value)
    return f"{sign}{key}={value}"


def _as_typed(key: str, text: str) -> str:
    """Return a text as a value that Hydra reads back unchanged: in quotes if it has `=`, commas or
    brackets."""
    # What is written in Hydra's own form stays (in quotes, with backslashes, ${...}, null): a
    # prompt only in quotes.
    text = text if key == "prompt" else text.strip()
    of_hydra = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if key != "prompt":
        of_hydra = of_hydra or text.lower() in ("", "null") or "\\" in text or "${" in text
    return text if of_hydra else as_value(text)


def _as_written(value: str, choices: Sequence[str]) -> str:
    """Return the choice that equals the value but for capitals; the value itself if there is
    none."""
    return next((name for name in choices if name.lower() == value.strip().lower()), value)


def _whole(number: str) -> str:
    return str(int(float(number))) if float(number).is_integer() else number


def _choices(key: str) -> list[str] | None:
    """Return the names of the files that `recipe` or a group of conf/ may choose; None for another
    key."""
    if key == "recipe":
        return sorted(recipe_files())
    folder = conf_folder() / key
    plain = re.fullmatch(r"[a-z]+", key) and folder.is_dir() and key != "hydra"
    return sorted(path.stem for path in folder.glob("*.yaml")) if plain else None


@cache
def _options() -> dict[str, Sequence[str]]:
    """Return, by dotted name, the values of each setting that has a closed set of them."""
    return {
        name: one.metadata["options"]
        for name, one, _ in all_settings()
        if "options" in one.metadata
    }


@cache
def _of_type(kind: Any) -> frozenset[str]:
    """Return the dotted names of the settings whose type is `kind`, or a union with it."""
    own = {
        name: (hint, *(() if get_origin(hint) in (list, dict) else get_args(hint)))
        for name, _, hint in all_settings()
    }
    return frozenset(name for name, kinds in own.items() if kind in kinds)
