"""Tables inside a README, kept equal to their result files.

    <!-- table: gpt2 columns=model,context,tokens_per_second -->
    (everything in between is replaced)
    <!-- end table -->

draws recipes/results/gpt2.json, and under it one line with the file's date, device, versions and command. Further
words: only=key:value,... keeps some of the rows; pivot=key value=key makes a column for each value of a key (pivot.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.report.formats import one_line
from flashtrain.report.rows import ResultFile, read_result
from flashtrain.report.table import OPTIONS, View, markdown_text, view_of

_START = re.compile(r"^<!--\s*table:\s*(?P<words>.*?)\s*-->\s*$")
_END = re.compile(r"^<!--\s*end table\s*-->\s*$")


@dataclass(frozen=True)
class _Place:
    """One marked place: its first and last inner line (as a slice), the result's name and the table asked for."""

    first: int
    end: int
    name: str
    view: View


def insert_tables(readme: str | Path, results: str | Path) -> list[str]:
    """Replace the text between every pair of markers by its table; returns the names of the tables that changed.

    results: the folder of the NAME.json files. Raises UserError for a marker without an end, a result that does not
    exist and a column that it lacks; then nothing is written.
    """
    readme = Path(readme)
    lines = _read(readme)
    changed: list[str] = []
    # from the last to the first, so that the places still to come keep their line numbers
    for place in reversed(_places(lines, readme)):
        wanted = _table_lines(place, readme, Path(results))
        if lines[place.first : place.end] != wanted:
            lines[place.first : place.end] = wanted
            changed.insert(0, place.name)
    if changed:
        write_atomically(readme, "\n".join(lines) + "\n")
    return changed


def check_tables(readme: str | Path, results: str | Path) -> list[str]:
    """The names of all tables of a README. Raises UserError when one of them is not what its result file gives."""
    readme = Path(readme)
    lines = _read(readme)
    places = _places(lines, readme)
    differing = [
        place.name for place in places if lines[place.first : place.end] != _table_lines(place, readme, Path(results))
    ]
    if differing:
        raise UserError(
            f"{readme} disagrees with the result files of: {', '.join(differing)}. "
            f"Run: python -m flashtrain.report --insert {readme}"
        )
    return [place.name for place in places]


def table_text(result: ResultFile, view: View) -> str:
    """A result as Markdown: its table, then one line saying when, on what and how it was measured."""
    return f"{view.table(result.rows).markdown()}\n{source_line(result)}\n"


def source_line(result: ResultFile) -> str:
    """Date, device, versions and command of a result, in one line of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    command = one_line(result.command)
    # a code span ends at a run of backticks of its own length
    fence = "`" * (1 + max(map(len, re.findall("`+", command)), default=0))
    room = " " if command.startswith("`") or command.endswith("`") else ""
    measured = f"Measured {result.date} on {markdown_text(result.device)} ({markdown_text(versions)})"
    return f"{measured}: {fence}{room}{command}{room}{fence}"


def _table_lines(place: _Place, readme: Path, results: Path) -> list[str]:
    file = results / f"{place.name}.json"
    if not file.is_file():
        raise UserError(f"{readme}: {unknown('result', place.name, [path.stem for path in results.glob('*.json')])}")
    try:
        return table_text(read_result(file), place.view).splitlines()
    except UserError as error:
        raise UserError(f"{readme}, table {place.name}: {error}") from error


def _places(lines: list[str], readme: Path) -> list[_Place]:
    places: list[_Place] = []
    start: tuple[int, str] | None = None
    in_code = False
    for number, line in enumerate(lines):
        # a README may show the markers themselves in a block of code
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        opening = None if in_code else _START.match(line)
        if opening and start:
            raise UserError(f"{readme}:{number + 1}: a table starts before the one of line {start[0] + 1} has ended.")
        if opening:
            start = (number, opening["words"])
        elif not in_code and _END.match(line):
            if start is None:
                raise UserError(f"{readme}:{number + 1}: this table's end has no start, <!-- table: NAME -->.")
            places.append(_place(start, number, readme))
            start = None
    if start:
        raise UserError(f"{readme}:{start[0] + 1}: this table has no end, <!-- end table -->.")
    return places


def _place(start: tuple[int, str], end: int, readme: Path) -> _Place:
    line, text = start
    name, *options = text.split() or [""]
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(
            f"{readme}:{line + 1}: a table's marker needs a result's name, <!-- table: NAME columns=a,b -->."
        )
    given: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in OPTIONS:
            raise UserError(f"{readme}:{line + 1}: {unknown('marker option', key, OPTIONS)}")
        given[key] = value
    try:
        return _Place(line + 1, end, name, view_of(given))
    except UserError as error:
        raise UserError(f"{readme}:{line + 1}: {error}") from error


def _read(readme: Path) -> list[str]:
    try:
        return readme.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {readme}: {error.strerror}.") from error
