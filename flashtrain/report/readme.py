"""Tables in Markdown pages, between two markers: made from result files, and checked against them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.report.formats import one_line
from flashtrain.report.rows import ResultFile, read_result
from flashtrain.report.table import View, markdown_text, view_of

_START = re.compile(r"^<!--\s*table:\s*(?P<name>[\w.-]+)(?P<options>.*?)-->\s*$")
_END = re.compile(r"^<!--\s*end table\s*-->\s*$")


def insert_tables(readme: str | Path, results: str | Path) -> list[str]:
    """Replace the text between every pair of markers by its table, and return the names of changed tables.

    Args:
        results: the folder of the NAME.json files.

    Raises:
        UserError: a marker without its partner, a missing result file or column; nothing is written then.
    """
    readme = Path(readme)
    whole: list[str] = []
    changed: list[str] = []
    for before, name, found, wanted in _tables(readme, Path(results)):
        whole += [*before, *wanted]
        if found != wanted:
            changed.append(name)
    if changed:
        write_atomically(readme, "\n".join(whole) + "\n")
    return changed


def check_tables(readme: str | Path, results: str | Path) -> list[str]:
    """The names of all tables of a page. Raises UserError if one of them differs from its result file."""
    tables = [(name, found == wanted) for _, name, found, wanted in _tables(Path(readme), Path(results)) if name]
    differing = [name for name, agrees in tables if not agrees]
    if differing:
        raise UserError(
            f"{readme} disagrees with the result files of: {', '.join(differing)}. "
            f"Run: python -m flashtrain.report --insert {readme}"
        )
    return [name for name, _ in tables]


def table_text(result: ResultFile, view: View) -> str:
    """A result as Markdown: its table, then the line of `source_line`."""
    return f"{view.table(result.rows).markdown()}\n{source_line(result)}\n"


def source_line(result: ResultFile) -> str:
    """Date, device, versions and command of a result, in one line of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    measured = f"Measured {result.date} on {markdown_text(result.device)} ({markdown_text(versions)})"
    return f"{measured}: `{one_line(result.command)}`"


def _tables(readme: Path, results: Path) -> Iterator[tuple[list[str], str, list[str], list[str]]]:
    """(lines before it, name, lines as they are, lines as they should be) of each table; last the rest, without name.

    A table's markers are in the lines before it and before the next table.
    """
    before: list[str] = []
    inside: list[str] = []
    start: re.Match[str] | None = None
    in_code = False
    for number, line in enumerate(readme.read_text(encoding="utf-8").splitlines(), start=1):
        # a README may show the markers themselves in a block of code
        in_code ^= line.lstrip().startswith(("```", "~~~"))
        opening, closing = (None, None) if in_code else (_START.match(line), _END.match(line))
        if (opening and start) or (closing and not start):
            raise UserError(f"{readme}:{number}: this table marker has no partner.")
        if closing and start:
            yield before, start["name"], inside, _wanted(readme, start, results)
            before, inside, start = [], [], None
        (inside if start else before).append(line)
        start = start or opening
    if start:
        raise UserError(f"{readme}: table {start['name']} has no end. Add the line <!-- end table -->.")
    yield before, "", [], []


def _wanted(readme: Path, start: re.Match[str], results: Path) -> list[str]:
    file = results / f"{start['name']}.json"
    try:
        if not file.is_file():
            raise unknown("result", start["name"], [path.stem for path in results.glob("*.json")])
        options = dict(option.partition("=")[::2] for option in start["options"].split())
        return table_text(read_result(file), view_of(options)).splitlines()
    except UserError as error:
        raise UserError(f"{readme}, table {start['name']}: {error}") from error
