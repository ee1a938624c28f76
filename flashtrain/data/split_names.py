"""Which split a file's name says that it is of: train.jsonl, validation-00000-of-00002.parquet, books_test.txt.gz."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from copy import copy
from pathlib import PurePath
from typing import Any, TypeVar

log = logging.getLogger(__name__)

# Split -> what files and datasets call it.
NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "eval"), "test": ("test",)}
_ANY = rf"({'|'.join(name for names in NAMES.values() for name in names)})(?:ing|set)?"
_WORD = re.compile(rf"(?<![a-z]){_ANY}(?![a-z])")
_WHOLE = re.compile(rf"{_ANY}(?:[-_.]?\d+)?(?:[-_.]of[-_.]\d+)?\..*")

File = TypeVar("File")


def split_named(path: PurePath) -> str | None:
    """The split that a word of the file's name says, or of the folders' that it is in; None where none does."""
    found = next(filter(None, (_WORD.search(part.lower()) for part in reversed(path.parts))), None)
    return None if found is None else next(split for split, names in NAMES.items() if found[1] in names)


def by_split(files: Mapping[PurePath, File], *, any_word: bool = False) -> dict[str, list[File]]:
    """A folder's files, of which the paths within it are given, by split and in their order; those without a name of
    one train.

    any_word: a word says it also where no file is named train; else only a name of nothing but the split and a number
    does then, and how-to-test.md is a text like others. Where nothing would be left to train on, all is.
    """
    names = {path: split_named(path) for path in files}
    if not any_word and "train" not in names.values():
        names = {path: name if _WHOLE.fullmatch(path.name.lower()) else None for path, name in names.items()}
    found: dict[str, list[File]] = {}
    for path, file in files.items():
        found.setdefault(names[path] or "train", []).append(file)
    return found if "train" in found else {"train": list(files.values())}


class SplitFiles:
    """A source whose files are of the split that it is of: those to train on, or what is held out of them."""

    split = "train"
    address: str | None = None  # in place of a path

    def by_split(self) -> dict[str, list[Any]]:
        """All files: Paths, or what stands for them of an address. Raises UserError: there are none."""
        raise NotImplementedError

    def files(self) -> list[Any]:
        """Those that are read."""
        return self.by_split()[self.split]

    def held_out(self) -> Any:
        """The files that are named for validation, as a source of their own; None where none is."""
        found = self.by_split()
        for split, what in (("validation", "held out"), ("test", "left out")):
            if split in found:
                log.info("%s: %s", what, ", ".join(PurePath(str(file)).name for file in found[split]))
        if self.split != "train" or "validation" not in found:
            return None
        other = copy(self)
        other.split = "validation"
        return other
