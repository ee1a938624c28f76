"""The Python source code of the packages that are installed beside flashtrain, as text."""

from __future__ import annotations

import csv
import hashlib
import logging
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, distributions
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from flashtrain.data.sources import TEST_FOLDERS, StandardLibrarySource

log = logging.getLogger(__name__)

# Copies of other packages: their texts would be read twice, and a copy of a held-out package
# would be trained on.
VENDORED_FOLDERS = {
    "_vendor",
    "vendor",
    "_vendored",
    "vendored",
    "extern",
    "externals",
    "third_party",
}
MAX_BYTES = 140_000_000  # about 35M tokens of a BPE trained on them: recipe=gpt2 reads 33M
MAX_FILE_BYTES = 200_000  # longer files are mostly tables, and code that was generated
HELD_OUT_SHARE = 0.015  # of all bytes
HELD_OUT_MAX_SHARE = 0.005  # of all bytes in one held-out package, so that several are held out


class SourceFile(NamedTuple):
    """A source file of an installed package."""

    package: str  # first word of the distribution's name: httpx and its copy httpx2 are on one side
    path: str  # within the folder of packages
    place: Path
    size: int
    version: str  # the hash that the installer wrote down, else the distribution's version


@dataclass
class PackagesSource:
    """A TextSource: the Python files of all installed packages and of the standard
    library, a document each.

    Documents are in the order of their files' names. Left out are vendored copies, long files,
    files that are not UTF-8, and of identical files all but the first. If there are more than
    MAX_BYTES, a hash of their names decides which files are read. Some small packages, also chosen
    by a hash, are held out whole.
    """

    include_tests: bool = False  # whether the packages' own tests are part of the text
    split: str = "train"  # or "validation": the packages that are held out

    def describe(self) -> str:
        return "Python source code of the installed packages and the standard library"

    def fingerprint(self) -> str:
        found = (f"{file.package} {file.path} {file.size} {file.version}" for file in self._files)
        return hashlib.sha256(
            "\n".join((self.split, *sorted(self._held_out), *found)).encode()
        ).hexdigest()

    def documents(self) -> Iterator[str]:
        seen = set()
        # What is held out comes first: a copy of it elsewhere is not trained on.
        for file in sorted(self._files, key=lambda file: file.package not in self._held_out):
            data = file.place.read_bytes()
            if (digest := hashlib.sha256(data).digest()) not in seen and self._reads(file):
                with suppress(UnicodeDecodeError):
                    yield data.decode()
            seen.add(digest)

    def approximate_bytes(self) -> int:
        return sum(file.size for file in self._files if self._reads(file))

    def held_out(self) -> PackagesSource | None:
        """Return the source of the packages that are held out; None if there are none, or if this
        source reads them itself."""
        if self.split != "train" or not self._held_out:
            return None
        log.info(
            "held out: the packages whose names begin with %s", ", ".join(sorted(self._held_out))
        )
        other = copy(self)  # with what this source has found
        other.split = "validation"
        return other

    def _reads(self, file: SourceFile) -> bool:
        return (file.package in self._held_out) == (self.split == "validation")

    @cached_property
    def _files(self) -> list[SourceFile]:
        """The files of both splits (train and validation), in the order of packages and paths."""
        drawn, room = [], MAX_BYTES
        for file in sorted(
            self._installed(), key=lambda file: _hash(f"{file.package} {file.path}")
        ):
            if file.size <= min(MAX_FILE_BYTES, room):
                room -= file.size
                drawn.append(file)
        return sorted(drawn)

    @cached_property
    def _held_out(self) -> set[str]:
        packages = groupby(self._files, key=lambda file: file.package)
        sizes = {package: sum(file.size for file in files) for package, files in packages}
        chosen, room = set(), HELD_OUT_SHARE * sum(sizes.values())
        for package in sorted(sizes, key=_hash):
            if room > 0 and sizes[package] <= HELD_OUT_MAX_SHARE * sum(sizes.values()):
                chosen.add(package)
                room -= sizes[package]
        return chosen

    def _installed(self) -> Iterator[SourceFile]:
        library, python = StandardLibrarySource(self.include_tests), platform.python_version()
        for place in library.files():
            name = place.relative_to(library.folder).as_posix()
            yield SourceFile("python", name, place, place.stat().st_size, python)
        skipped = VENDORED_FOLDERS if self.include_tests else VENDORED_FOLDERS | TEST_FOLDERS
        found: dict[str, Distribution] = {}
        for one in distributions():  # of two with one name, Python imports the first
            found.setdefault(re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower(), one)
        for name, one in found.items():
            package = re.split("[^a-z]", name)[0]
            for path, version in _python_files(one):
                if not {"..", *skipped} & set(path.split("/")):
                    place = Path(str(one.locate_file(path)))
                    if place.is_file():
                        yield SourceFile(package, path, place, place.stat().st_size, version)


def _python_files(one: Distribution) -> Iterator[tuple[str, str]]:
    """Yield a distribution's Python files as (path, the file's hash or the version)."""
    # `one.files` makes an object of every file and, since Python 3.12, looks for each: seconds.
    record = one.read_text("RECORD")
    if record is None:  # not installed from a wheel
        found = [(path.as_posix(), path.hash and path.hash.value) for path in one.files or ()]
    else:
        lines = csv.reader(line for line in record.splitlines() if ".py" in line)
        found = [(path, spec.partition("=")[2]) for path, spec, *_ in lines]
    yield from ((path, known or one.version) for path, known in found if path.endswith(".py"))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
