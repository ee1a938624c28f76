"""Every setting as a page: what the dataclasses of the settings say of themselves.

A setting's meaning is what its dataclass says of it ("name: ..." or "name, other: ..." in the docstring), else the
comment on its line in the source, else WORDS below. Its possible values are those of its `option`.
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
from flashtrain.settings.schema import schema_of
from flashtrain.settings.settings import Settings

# Too long for the line of their setting, where all others have their words.
WORDS = {
    "model.name": "gpt2, llama or plain, or one that your program registered; model=NAME also takes conf/model's file",
    "model.options": "of a model that your program registered: +model.options.NAME=VALUE",
    "data.source": "stdlib, packages, files or hub, or one that your program registered; data=NAME also takes "
    "conf/data's file",
    "benchmark.name": "what is measured; recipes set it",
    "data.workers": "processes that build batches, a device; 0: the training process; null: 2 on GPUs, else 0",
    "data.options": "of a source that your program registered: +data.options.NAME=VALUE",
    "mask.options": "of a mask that your program registered: +mask.options.NAME=VALUE",
    "optimizer.options": "of an optimiser that your program registered: +optimizer.options.NAME=VALUE",
    "schedule.options": "of a schedule that your program registered: +schedule.options.NAME=VALUE",
    "curriculum.stages[].side": "of the images",
    "curriculum.stages[].learning_rate": "as optimizer.learning_rate",
    "curriculum.stages[].warmup_steps": "as schedule.warmup_steps",
    "curriculum.stages[].batch": "as sequence.batch",
    "curriculum.stages[].micro_batch": "as trainer.micro_batch",
    "curriculum.stages[].pattern": "as classifier.pattern",
    "curriculum.stages[].masked_weight": "as masked_pixels.weight",
    "curriculum.stages[].classification_weight": "as sequence.classification_weight",
    "curriculum.stages[].training_pixels": "as sequence.training_pixels",
    "curriculum.stages[].validate_every": "as trainer.validate_every",
    "mode": "train, plan, evaluate, generate, export or passkey; benchmark, lengths and preview are of their recipes",
    "task": "language_model, classification, masked_language_model or fine_tuning; recipes set it",
    "weights": "start from weights: Hugging Face GPT-2 or BERT (folder or .safetensors), an "
    "export, a run folder or .ckpt",
    "trainer.strategy": "auto, ddp, fsdp (FSDP2: sharded weights) or context (FSDP2, and each sequence "
    "over several devices)",
    "trainer.cuda_graphs": "record the compiled step's launches and replay them: for small models, where "
    "launching takes longest",
    "finetune.config": "of the dataset",
    "masked_pixels.copies": "of the images are read a second time with pixels hidden; 0: all are read once, "
    "with pixels hidden",
}


def settings_page(first_line: str) -> str:
    """Every setting: its name, type, default and meaning, a section a group. first_line: what follows the title."""
    lines = [
        "# Every setting",
        "",
        first_line,
        "",
        "A setting is given as `name=value` after the recipe. A recipe's values come before these defaults, and the",
        "command line's come before both. `python -m flashtrain recipe=gpt2 --cfg job` prints what a recipe comes to.",
        "A name that the recipe's task does not have is refused in one line, with the nearest name. So is one that the",
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
    """A group's heading, what is said of it as a whole, its table, and the groups inside of it, but for `shown`."""
    introduction, meanings = described(type(group))
    yield from (f"## {title}", "")
    if introduction:
        yield from (introduction, "")
    hints = typing.get_type_hints(type(group))
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
        part = next((kind for kind in typing.get_args(hints[one.name]) if dataclasses.is_dataclass(kind)), None)
        if part is not None:
            inner.append((f"{name}[]", part()))
        told = meanings.get(one.name) or comments().get(name) or WORDS.get(name, "")
        possible = one.metadata.get("options", ())
        if not all(value in told for value in possible):
            listed = ", ".join(f"`{value}`" for value in possible)
            told = f"{told}{'. ' if told else ''}One of {listed}"
        rows.append(f"| `{name}` | {kind_of(hints[one.name])} | `{yaml_of(default)}` | {cell(told)} |")
    if rows:
        yield from ("| setting | type | default | meaning |", "| :--- | :--- | :--- | :--- |", *rows, "")
    for name, one in inner:
        yield from _section(f"`{name}`", f"{name}.", one, shown)


def described(cls: type) -> tuple[str, dict[str, str]]:
    """What a dataclass's docstring says of the whole, and of each field that it names: "name: ...", "a, b: ..."."""
    introduction: list[str] = []
    meanings: dict[str, str] = {}
    own = [one.name for one in dataclasses.fields(cls)]
    for base in _dataclasses(cls):
        name = rf"`?(?:{'|'.join(sorted(own, key=len, reverse=True))})`?"
        entry = re.compile(rf"(?:^|(?<=[.;] ))({name}(?:(?:, | and ){name})*)(?: (None))?: ")
        for paragraph in inspect.cleandoc(base.__doc__ or "").split("\n\n"):
            text = " ".join(paragraph.split())
            found = list(entry.finditer(text))
            whole = text[: found[0].start()] if found else text
            if base is cls and whole.strip():
                introduction.append(whole.strip())
            for one, after in zip(found, [*found[1:], None], strict=False):
                said = text[one.end() : after.start() if after else len(text)].strip(" .;")
                said = f"null: {said}" if one[2] else said
                for each in re.findall(r"\w+", one[1].replace(" and ", " ")):
                    meanings[each] = said
    return _plain("\n\n".join(introduction)), {name: _plain(said) for name, said in meanings.items()}


def _dataclasses(cls: type) -> list[type]:
    """The class and those that it is derived from, the last one first."""
    return [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]


def _plain(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text)


_COMMENTS: dict[str, str] = {}


def comments() -> dict[str, str]:
    """The comment on each setting's line, or on the lines above it, in the source of its dataclass."""
    if not _COMMENTS:
        for task in registered("task"):
            _COMMENTS.update(_source_comments(schema_of(task)(), ""))
    return _COMMENTS


def _source_comments(group: Any, prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    lines = [line for base in _dataclasses(type(group)) for line in inspect.getsource(base).splitlines()]
    above: list[str] = []
    for line in lines:
        if comment := re.match(r"    #\s*(.+)$", line):
            above.append(comment[1])
            continue
        if match := re.match(r"    (\w+): (?:.*?\s{2}#\s*(.+)$)?", line):
            text = match[2] or " ".join(above)
            found |= {f"{prefix}{match[1]}": text.rstrip(".")} if text else {}
        above = []
    for one in dataclasses.fields(group):
        value = getattr(group, one.name)
        if dataclasses.is_dataclass(value):
            found.update(_source_comments(value, f"{prefix}{one.name}."))
    return found


def kind_of(hint: Any) -> str:
    """A type in words."""
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "any"}
    if hint in words:
        return words[hint]
    if dataclasses.is_dataclass(hint):
        return "settings"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return kind_of(next(part for part in inner if part is not type(None)))
    if origin is list:
        one = kind_of(inner[0])
        return f"list of {one}" if one == "settings" else f"list of {one}s"
    return "mapping" if origin is dict else str(hint)


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
