"""Find a file's split by its name: train.jsonl,
validation-00000-of-00002.parquet, books_test.txt.gz."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path, PurePath
from typing import Any, TypeVar

from flashtrain.errors import UserError

log = logging.getLogger(__name__)

# Split -> its names in files and datasets.
NAMES = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test",),
}
_ANY = rf"({'|'.join(name for names in NAMES.values() for name in names)})(?:ing|set)?"
# Of other files, such as a program's eval.py, only the whole name of a folder states a split.
_DATA = {".txt", ".md", ".jsonl", ".parquet", ".json", ".csv", ".tsv", ".npy", ".bin"}
_WORD = re.compile(rf"(?<![a-z]){_ANY}(?![a-z])")
_WHOLE = re.compile(rf"{_ANY}(?:[-_.]?\d+)?(?:[-_.]of[-_.]\d+)?\..*")

File = TypeVar("File")


def split_named(path: PurePath) -> str | None:
    """Return the split that a word in a file's or its folders' names states: train,
    validation, test or None."""
    parts = [part.lower() for part in reversed(path.parts)]
    if _DATA & {suffix.lower() for suffix in path.suffixes}:
        parts = [found[1] for found in map(_WORD.search, parts) if found]
    return next((split for part in parts for split, names in NAMES.items() if part in names), None)


def by_split(files: Mapping[PurePath, File], *, any_word: bool = False) -> dict[str, list[File]]:
    """Group a folder's files by the split that their names state, each group in the given order.

    Files without a split's name are for training, and so are all files if none
    would be left for training.

    Args:
        files: The files by their paths within the folder.
        any_word: Whether any word of a path states the split, also if no file is named train.
            False: without a file named train, a file's name must be the split's and at most a
            number (test-1.txt); how-to-test.md is then an ordinary text.
    """
    names = {path: split_named(path) for path in files}
    if not any_word and "train" not in names.values():
        names = {
            path: name if _WHOLE.fullmatch(path.name.lower()) else None
            for path, name in names.items()
        }
    found: dict[str, list[File]] = {}
    for path, file in files.items():
        found.setdefault(names[path] or "train", []).append(file)
    return found if "train" in found else {"train": list(files.values())}


class SplitFiles:
    """Base class of sources that read the files of one split: those for
    training, or those held out."""

    split = "train"
    path: Path
    address: str | None = None  # used in place of the path
    expected: str  # names of the files that are read, for messages
    any_word = False  # see by_split
    left_out = ""  # which of the files that were found are not read, for messages

    def chosen(self, found: dict[PurePath, Any]) -> dict[PurePath, Any]:
        """Return those of the found files that the source reads."""
        raise NotImplementedError

    def by_split(self) -> dict[str, list[Any]]:
        """Group all files of the source by split, as Paths or, if data.path is an address, as
        RemoteFiles. Raises UserError if there are no files."""
        from flashtrain.files.found_files import find_files  # a plan needs none of it

        place = self.address or self.path
        found = self.chosen(find_files(place))
        if not found:
            json = ""
            if str(place).endswith(".json"):
                json = ". A .json list: jq -c '.[]' NAME.json > NAME.jsonl"
            raise UserError(
                f"no readable file at data.path={place}: "
                f"expected {self.expected}{self.left_out}{json}."
            )
        return by_split(found, any_word=self.any_word)

    def files(self) -> list[Any]:
        """List the files of this source's split."""
        return self.by_split()[self.split]

    def held_out(self) -> Any:
        """Return a source of the files that are named for validation; None if there are none."""
        found = self.by_split()
        for split, what in (("validation", "held out"), ("test", "left out")):
            if split in found:
                log.info(
                    "%s: %s", what, ", ".join(PurePath(str(file)).name for file in found[split])
                )
        if self.split != "train" or "validation" not in found:
            return None
        other = copy(self)
        other.split = "validation"
        return other
