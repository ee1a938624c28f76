"""Every setting as a page: what the dataclasses of the settings say of themselves.

A setting's meaning is what its dataclass says of it ("name: ..." or "name, other: ..." in the docstring), else the
comment on its line in the source, else the comment on its line in conf/, else WORDS below. Its possible values are
those that check() lists when it refuses a name that cannot exist.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.disk import conf_folder
from flashtrain.settings.settings import Settings

IMPOSSIBLE = "no such name"  # no setting has it as a value
# Of settings that neither their dataclass nor conf/ says anything of: move a line there when you touch one.
WORDS = {
    "recipe": "which file of recipes/, or of your own folders",
    "seed": "of the weights, the order of samples and dropout",
    "is_demo": "whether the demo was put in the recipe's place; the command sets it",
    "model.name": "gpt2, modern or plain, or one that your program registered; model=NAME also takes conf/model's file",
    "model.size": "demo, 124m, 355m, 774m, 1.3b or 1.5b",
    "model.dropout": "a probability, of embeddings, attention weights and both branches of a block",
    "model.options": "of a model that your program registered: +model.options.NAME=VALUE",
    "data.source": "stdlib, files or hub, or one that your program registered; data=NAME also takes conf/data's file",
    "data.path": "of data=files: a file or a folder",
    "data.name": "of data=hub: the dataset",
    "data.config": "of data=hub: the dataset's configuration",
    "data.split": "of data=hub: the dataset's split",
    "data.text_column": "the field of .jsonl lines, .parquet rows and hub datasets that holds the text",
    "data.streaming": "of data=hub: read while downloading, or download first",
    "data.include_tests": "of data=stdlib: with the standard library's tests",
    "data.vocab_size": "tokens of data.tokenizer=bpe",
    "data.vocab": "of data.tokenizer=gpt2: a local vocab.json",
    "data.merges": "of data.tokenizer=gpt2: a local merges.txt",
    "data.document_mask": "attention stays within each document of a packed row, and positions begin anew there",
    "data.validation_fraction": "of the documents, held out",
    "data.workers": "processes that build batches, a device; 0: the training process; null: 2 on GPUs, else 0",
    "data.cache_dir": "where token files lie; null: FLASHTRAIN_CACHE, else the user's cache folder",
    "data.options": "of a source that your program registered: +data.options.NAME=VALUE",
    "optimizer.name": "adamw, lamb or muon, or one that your program registered",
    "optimizer.learning_rate": "at the schedule's peak",
    "optimizer.epsilon": "added to the denominator of AdamW's step",
    "optimizer.options": "of an optimiser that your program registered: +optimizer.options.NAME=VALUE",
    "schedule.name": "cosine, linear or constant, or one that your program registered",
    "schedule.minimum_ratio": "the last learning rate as a share of the peak",
    "schedule.options": "of a schedule that your program registered: +schedule.options.NAME=VALUE",
    "trainer.nodes": "machines",
    "trainer.log_every": "steps between two logged rows",
    "trainer.validate_every": "steps between two validations",
    "trainer.checkpoint_every": "steps between two checkpoints",
    "logger.project": "of Weights & Biases",
    "logger.run_name": "of Weights & Biases",
    "generate.tokens": "how many are written",
    "generate.temperature": "divides the logits; 0 takes the likeliest token",
    "generate.top_k": "tokens are drawn among the so many likeliest",
    "benchmark.tokens": "of a batch, where benchmark.batch or .batches does not say",
    "benchmark.kv_heads": "key/value heads; null: as many as heads",
    "benchmark.dropout": "of attention's weights: a probability",
    "benchmark.directions": "what is timed",
    "benchmark.reference": "also compute a float64 reference, and each implementation's error",
    "classifier.embed": "width",
    "classifier.layers": "blocks",
    "classifier.heads": "attention heads",
    "classifier.dropout": "a probability",
    "classifier.pattern_block": "tokens of a block of the pattern",
    "curriculum.stages[].side": "of the images",
    "curriculum.stages[].learning_rate": "as optimizer.learning_rate",
    "curriculum.stages[].warmup_steps": "as schedule.warmup_steps",
    "curriculum.stages[].batch": "as sequence.batch",
    "curriculum.stages[].micro_batch": "as trainer.micro_batch",
    "curriculum.stages[].drawn_step": "pixels of a side between two drawings of drawn_as; null: 8",
    "curriculum.stages[].pattern": "as classifier.pattern",
    "curriculum.stages[].masked_weight": "as masked_pixels.weight",
    "curriculum.stages[].classification_weight": "as sequence.classification_weight",
    "curriculum.stages[].training_pixels": "as sequence.training_pixels",
    "curriculum.stages[].validate_every": "as trainer.validate_every",
    "bert.dropout": "a probability",
    "finetune.name": "of finetune.data=hub: the dataset",
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
        "A name that does not exist is refused in one line, with the nearest name. So is one that nothing heeds.",
        "",
        "`null` means that the run decides, from the machine or the model.",
        "",
    ]
    return "\n".join([*lines, *_section("The run", "", Settings(), Settings.check)]) + "\n"


def _section(title: str, prefix: str, group: Any, check: Any) -> Iterator[str]:
    """A group's heading, what is said of it as a whole, its table, and the groups inside of it."""
    introduction, meanings = described(type(group))
    yield from (f"## {title}", "")
    if introduction:
        yield from (introduction, "")
    hints = typing.get_type_hints(type(group))
    inner: list[tuple[str, Any]] = []
    rows = []
    for one in dataclasses.fields(group):
        default, name = getattr(group, one.name), f"{prefix}{one.name}"
        if dataclasses.is_dataclass(default):
            inner.append((name, default))
            continue
        part = next((kind for kind in typing.get_args(hints[one.name]) if dataclasses.is_dataclass(kind)), None)
        if part is not None:
            inner.append((f"{name}[]", part()))
        told = meanings.get(one.name) or comments().get(name) or WORDS.get(name, "")
        possible = choices(group, one.name, check)
        if not all(value in told for value in possible):
            listed = ", ".join(f"`{value}`" for value in possible if " " not in value)
            listed = ", ".join([listed, *(value for value in possible if " " in value)])
            told = f"{told}{'. ' if told else ''}One of {listed}"
        rows.append(f"| `{name}` | {kind_of(hints[one.name])} | `{yaml_of(default)}` | {cell(told)} |")
    yield from ("| setting | type | default | meaning |", "| :--- | :--- | :--- | :--- |", *rows, "")
    for name, one in inner:
        yield from _section(f"`{name}`", f"{name}.", one, getattr(type(one), "check", None))


def described(cls: type) -> tuple[str, dict[str, str]]:
    """What a dataclass's docstring says of the whole, and of each field that it names: "name: ...", "a, b: ..."."""
    introduction: list[str] = []
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        own = vars(base).get("__annotations__", {})
        if not dataclasses.is_dataclass(base) or not own:
            continue
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


def _plain(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text)


_COMMENTS: dict[str, str] = {}


def comments() -> dict[str, str]:
    """The comment on each setting's line: in the source of its dataclass, and in conf/ where that has none."""
    if not _COMMENTS:
        folder = conf_folder()
        for path in sorted(folder.rglob("*.yaml")):
            group = "" if path.parent == folder else f"{path.parent.name}."
            _COMMENTS.update({**_yaml_comments(path, group), **_COMMENTS})
        _COMMENTS.update(_source_comments(Settings(), ""))
    return _COMMENTS


def _yaml_comments(path: Path, group: str) -> dict[str, str]:
    found: dict[str, str] = {}
    inside = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"(\s*)(\w+):(?:\s+(?:#\s*(.*)|[^#]*(?:#\s*(.*))?))?$", line)
        if match is None:
            continue
        if not match[1]:
            inside = f"{match[2]}."
        name = f"{group}{inside if match[1] else ''}{match[2]}"
        if match[3] or match[4]:
            found[name] = (match[3] or match[4]).strip()
    return found


def _source_comments(group: Any, prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in inspect.getsource(type(group)).splitlines():
        match = re.match(r"    (\w+): .*?\s{2}#\s*(.+)$", line)
        if match:
            found[f"{prefix}{match[1]}"] = match[2]
    for one in dataclasses.fields(group):
        value = getattr(group, one.name)
        if dataclasses.is_dataclass(value):
            found.update(_source_comments(value, f"{prefix}{one.name}."))
    return found


def choices(group: Any, name: str, check: Any) -> list[str]:
    """The names that a setting may have, as its group's check lists them; none where it takes more than names."""
    if check is None or "str" not in str(typing.get_type_hints(type(group))[name]):
        return []
    changed = dataclasses.replace(group, **{name: IMPOSSIBLE})
    try:
        check(changed)
    except UserError as error:
        found = re.fullmatch(rf"unknown .* '{IMPOSSIBLE}'\..*?Possible: (.*)\.", str(error))
        return found[1].split(", ") if found else []
    except (TypeError, ValueError, AttributeError, IndexError):
        return []
    return []


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
