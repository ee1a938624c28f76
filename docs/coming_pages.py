"""A page for who comes from another trainer, of coming_from.yaml and the command's answers."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.settings.schema import check_names, setting_names

SOURCE = Path(__file__).with_name("coming_from.yaml")
TASK = "language_model"
# `--name value`, `name: value` and `name = value`, at the beginning of a line
_LINE = re.compile(r"^(?: *--(\w+) ?|(\w+) *[:=] *)([^#\\\n]*)", re.MULTILINE)
_SETTING = re.compile(r"(?<![\w./`])([a-z_]+(?:\.[a-z_]+)+(?:=[^\s,;:)]+)?|[a-z_]+=[^\s,;:)]+)")


def coming_pages(first_line: str) -> dict[str, str]:
    """The pages by file name. first_line: what follows a title."""
    return {f"start/from-{key}.md": _page(one, first_line) for key, one in trainers().items()}


def trainers() -> dict[str, dict[str, Any]]:
    """What coming_from.yaml holds, by the end of a page's name."""
    return dict(yaml.safe_load(SOURCE.read_text(encoding="utf-8")))


def names_of(config: str) -> dict[str, Any]:
    """The names that a configuration of another trainer sets, with their values."""
    return {one[1] or one[2]: _value(one[3]) for one in _LINE.finditer(config)}


def rows_of(one: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a page's table answers: the names of its configuration and further ones, with values."""
    more = (word.partition("=") for word in one["more"].split())
    return [*names_of(one["config"]).items(), *((name, value or None) for name, _, value in more)]


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text.strip()


def answer_to(name: str, value: Any) -> str | None:
    """What the command says is used in place of a name, or why there is nothing; None where it does
    not know the name."""
    try:
        check_names({name: value}, TASK)
    except UserError as error:
        said = re.sub(r"^unknown setting '.*?'\. |^\S+: ", "", str(error))
        known = not re.match("Did you mean|`python|Expected", said)
        return re.sub(r"^[Uu]se (.*)\.$", r"\1", said) if known else None
    return name if name in setting_names(TASK) else None


def defaults_of(command: str) -> dict[str, Any]:
    """The settings of a command's recipe by dotted name, where nothing else is given."""
    recipe = re.findall(r"recipe=\w+", command)[0]
    needed = ["model.path=MODEL", "data.path=FILE"] if recipe == "recipe=sft" else []
    plain = asdict(compose_settings([recipe, *needed]))
    return {name: reduce(getitem, name.split("."), plain) for name in setting_names(TASK)}


def _page(one: dict[str, Any], first_line: str) -> str:
    name = one["name"]
    defaults = defaults_of(one["command"])
    lines = [
        f"# Coming from {name}",
        "",
        first_line,
        "",
        "## A configuration, translated",
        "",
        f"This is {one['source']}:",
        "",
        f"```{one['language']}",
        one["config"].rstrip(),
        "```",
        "",
        "The same here:",
        "",
        "```bash",
        one["command"].rstrip(),
        "```",
        "",
        fill(one["step"], 150),
        "`mode=plan` beside the words prints memory and time.",
        "The command starts a process for each GPU: `trainer.devices=4`, and no launcher.",
        "",
        "## Defaults beside each other",
        "",
        f"| setting | default here | {name}'s | |",
        "| :--- | :--- | :--- | :--- |",
    ]
    for setting, there, why in one["differs"]:
        here = defaults[setting]
        here = "null" if here is None else str(here).lower() if isinstance(here, bool) else here
        lines.append(f"| `{setting}` | {here} | {there} | {why} |")
    lines += ["", *(f"- {line}" for line in one.get("left", ())), *([""] if "left" in one else [])]
    lines += [
        "## Names",
        "",
        "A name of another program on the command line is answered as here:",
        "",
        f"| {name} | here |",
        "| :--- | :--- |",
    ]
    rows = rows_of(one)
    names = [other for other, _ in rows]
    for other, value in rows:
        ours = answer_to(other, value)
        if ours is None:
            raise SystemExit(f"coming_from.yaml: the command has no answer to {other} of {name}")
        shown_answer = f"`{ours}`" if ours in setting_names(TASK) else _SETTING.sub(r"`\1`", ours)
        # The value where the answer depends on it, or others have a row too.
        depends = ours != answer_to(other, None) or names.count(other) > 1
        shown = f"{other}={value}" if depends and value is not None else other
        lines.append(f"| `{shown}` | {shown_answer} |")
    return "\n".join([*lines, ""])
