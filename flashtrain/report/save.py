"""Result files: a run's rows saved with what made them, and put as tables into pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.files.foreign_files import parse_json
from flashtrain.report.formats import cell, one_line
from flashtrain.report.rows import RESULT, ResultFile, Row, collect_summaries, read_result, values_of, write_result
from flashtrain.report.sweep import override_texts, varied_keys, with_overrides
from flashtrain.report.table import OPTIONS, View, markdown_text, view_of

# Said once for the whole file, not in each row; paths of this machine say nothing to a reader.
_LEFT_OUT = ("run", "versions", "overrides", "command", "recipe")


def save_result(path: str | Path, folder: str | Path, command: str | None = None) -> ResultFile:
    """Write the result file of the runs in `folder`, with the device and versions that the runs themselves recorded.

    command: what reproduces them; by default put together from the recipe and the runs' overrides, those with several
    values as a sweep. A run that measures (a benchmark) has made its result file already, which is then taken as it is.
    Raises UserError when the folder has no finished row to take recipe and device from.
    """
    if (Path(folder) / RESULT).is_file():
        measured = read_result(Path(folder) / RESULT)
        return write_result(
            path,
            measured.recipe,
            command or measured.command,
            measured.rows,
            measured.device,
            measured.versions,
            measured.date,
        )
    collected = collect_summaries(folder)
    # a killed job tells its context by its overrides only, and a swept learning rate is in no summary at all
    rows = with_overrides(collected)
    told = varied_keys(rows)
    rows = [{k: v for k, v in row.items() if k in own or k in told} for row, own in zip(rows, collected, strict=True)]
    recipes, devices, versions = (values_of(rows, key) for key in ("recipe", "device", "versions"))
    if not recipes or not devices:
        raise UserError(f"no run in '{folder}' tells its recipe and device: there is nothing to save.")
    if len(versions) > 1:
        raise UserError(f"the runs in '{folder}' were made with different versions: save runs of one environment.")
    left_out = {*_LEFT_OUT, *(["device"] if len(devices) == 1 else [])} - ({"recipe"} if len(recipes) > 1 else set())
    return write_result(
        path,
        recipe=", ".join(map(str, recipes)),
        command=command or reproducing_command(rows),
        rows=[_flat(row, left_out) for row in rows],
        device="; ".join(map(str, devices)),
        versions=_versions(versions[0]) if versions else None,
    )


def join_results(path: str | Path, sources: Sequence[str | Path], command: str | None = None) -> ResultFile:
    """Write one result file of several runs that measured, as a benchmark that was done in parts.

    sources: their folders, or result files. command: None: theirs, one after the other. Raises UserError for a folder
    without a result.json, and where device, versions or recipe differ.
    """
    parts = []
    for source in map(Path, sources):
        if source.is_dir() and not (source / RESULT).is_file():
            raise UserError(f"--save joins runs that measured, and '{source}' holds no {RESULT}: give one folder.")
        parts.append(read_result(source / RESULT if source.is_dir() else source))
    first = parts[0]
    for key in ("recipe", "device", "versions"):
        different = [part for part in parts if getattr(part, key) != getattr(first, key)]
        if different:
            raise UserError(
                f"--save joins runs of one {key}, not {getattr(first, key)} and {getattr(different[0], key)}."
            )
    return write_result(
        path,
        first.recipe,
        command or "; ".join(dict.fromkeys(part.command for part in parts)),
        [row for part in parts for row in part.rows],
        first.device,
        first.versions,
        max(part.date for part in parts),
    )


def reproducing_command(rows: Sequence[Mapping[str, Any]]) -> str:
    """The command that starts these runs again: a key's different values become a comma-separated sweep."""
    recorded = values_of(rows, "command")
    if len(recorded) == 1:
        return str(recorded[0])
    words: dict[str, list[str]] = {"recipe": [str(value) for value in values_of(rows, "recipe")]}
    for row in rows:
        for key, value in override_texts(row).items():
            given = words.setdefault(key, [])
            if value not in given:
                given.append(value)
    settings = [shlex.quote(f"{key}={','.join(values)}") for key, values in words.items()]
    several = any(len(values) > 1 for values in words.values())
    return " ".join(["python -m flashtrain", *(["-m"] if several else []), *settings])


def _flat(row: Mapping[str, Any], left_out: set[str]) -> Row:
    """The row with lists and mappings as text: a result's rows are flat."""
    kept = {key: value for key, value in row.items() if key not in left_out}
    return {key: cell(key, value) if isinstance(value, (list, tuple, dict)) else value for key, value in kept.items()}


def _versions(recorded: Any) -> dict[str, str]:
    """Versions as a mapping, from a mapping, its JSON, or a text such as "torch 2.13.0, triton 3.7.1"."""
    if isinstance(recorded, str):
        try:
            recorded = parse_json(recorded, "versions")
        except UserError:
            pairs = [part.replace("=", " ").split() for part in recorded.split(",")]
            recorded = {pair[0]: pair[-1] for pair in pairs if pair}
    if not isinstance(recorded, Mapping):
        raise UserError(f"the runs' versions are no names with versions, but {one_line(str(recorded))}.")
    return {str(name): str(version) for name, version in recorded.items()}


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
