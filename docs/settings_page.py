"""Every setting as a page: its name, type, default and meaning, from the
dataclasses of the settings.

A setting's meaning is the comment on its line in the source, or on the lines above it, and
its `option`'s values.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from flashtrain.registry import registered
from flashtrain.settings.options import REPLACES
from flashtrain.settings.schema import schema_of
from flashtrain.settings.settings import Settings


def settings_page(first_line: str) -> str:
    """Every setting, a section a group. first_line: what follows the title."""
    lines = [
        "# Every setting",
        "",
        first_line,
        "",
        (
            "A setting is given as `name=value` after the recipe. "
            "A recipe's values come before these defaults, and the"
        ),
        (
            "command line's come before both. "
            "`python -m flashtrain recipe=gpt2 --cfg job` prints what a recipe comes to."
        ),
        (
            "A name that the recipe's task does not have is refused in one line, "
            "with the nearest name. So is one that the"
        ),
        "mode does not use.",
        "",
        "`null` means that the run decides, from the machine or the model.",
        "",
    ]
    shown: set[str] = set()
    lines += _section("Every run", "", Settings(), shown)
    for task in registered("task"):
        lines += _section(f"task={task}", "", schema_of(task)(), shown)
    return "\n".join(lines) + "\n"


def _section(title: str, prefix: str, group: Any, shown: set[str]) -> Iterator[str]:
    """A group's heading, its docstring, its table, and the groups inside of it, but for
    what was shown before."""
    yield from (
        f"## {title}",
        "",
        " ".join(inspect.cleandoc(type(group).__doc__ or "").split()),
        "",
    )
    hints, meanings = typing.get_type_hints(type(group)), comments(type(group))
    inner: list[tuple[str, Any]] = []
    rows = []
    for one in dataclasses.fields(group):
        default, name = getattr(group, one.name), f"{prefix}{one.name}"
        if name in shown:
            continue
        shown.add(name)
        if dataclasses.is_dataclass(default):
            inner.append((name, default))
            continue
        part = next(
            (kind for kind in typing.get_args(hints[one.name]) if dataclasses.is_dataclass(kind)),
            None,
        )
        if part is not None:
            inner.append((f"{name}[]", part()))
        meaning, possible = meanings.get(one.name, ""), one.metadata.get("options", ())
        if REPLACES in one.metadata:
            run = one.metadata[REPLACES]
            meaning = f"In place of `{run}` in a stage of `{prefix[:-3]}`. {meaning}"
        if not all(value in meaning for value in possible):
            meaning += f" One of {', '.join(f'`{value}`' for value in possible)}."
        rows.append(
            f"| `{name}` | {type_of(hints[one.name])} | `{yaml_of(default)}` | "
            f"{cell(meaning.strip())} |"
        )
    if rows:
        yield from (
            "| setting | type | default | meaning |",
            "| :--- | :--- | :--- | :--- |",
            *rows,
            "",
        )
    for name, one in inner:
        yield from _section(f"`{name}`", f"{name}.", one, shown)


def comments(cls: type) -> dict[str, str]:
    """The comment of each field, its own and inherited ones, as a sentence."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines() if dataclasses.is_dataclass(base) else ():
            if comment := re.match(r"    #\s*(.+)$", line):
                above.append(comment[1])
                continue
            if match := re.match(r"    (\w+): (?:.*?\s{2}#\s*(.+)$)?", line):
                text = match[2] or " ".join(above)
                found |= {match[1]: f"{text[0].upper()}{text[1:].rstrip('.')}."} if text else {}
            above = []
    return found


def type_of(hint: Any) -> str:
    """A type as Python has it, without `| None`, for which the default says null."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return type_of(next(part for part in inner if part is not type(None)))
    if origin is list:
        return f"list[{type_of(inner[0])}]"
    if dataclasses.is_dataclass(hint) or origin is dict:
        return "dict"
    return "any" if hint is Any else str(hint.__name__)


def yaml_of(value: Any) -> str:
    """A default as the command line and YAML write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(yaml_of, value))}]"
    return str(value) if value != "" else '""'


def cell(text: str) -> str:
    """Text as it may stand in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
