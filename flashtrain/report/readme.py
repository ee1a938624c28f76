"""Write the tables between markers in Markdown pages from result files, or check
them against these files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.report.formats import one_line
from flashtrain.report.rows import ResultFile, read_result
from flashtrain.report.table import View, markdown_text, view_of

# A table's first marker, its lines, and (looked at, but not in the match) its last marker.
_TABLE = re.compile(
    (
        r"^(?P<marker><!-- table: (?P<name>[\w.-]+)(?P<options>.*?)-->\n"
        r")(?P<lines>.*?)(?=^<!-- end table -->$)"
    ),
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"^<!--\s*(table:|end table)", re.MULTILINE)
_NEXT_COMMAND = re.compile(r"; (?=(?:\w+=\S+ )*python )")  # between two of a result's commands


def insert_tables(readme: str | Path, results: str | Path) -> list[str]:
    """Redraw the tables of a Markdown page, and return the names of those that changed.

    A table lies between <!-- table: NAME --> and <!-- end table -->, and is drawn from NAME.json.
    Below the table stand the date, the device, and a fold (HTML details) with versions and
    commands. If the marker has `command=link`, a link to the table of README.md replaces the fold.

    Args:
        readme: the page.
        results: the folder of the NAME.json files.

    Raises:
        UserError: a marker without its partner, a missing result file or column;
            nothing is written then.
    """
    page, _, changed = _drawn(Path(readme), Path(results))
    if changed:
        write_atomically(readme, page)
    return changed


def check_tables(readme: str | Path, results: str | Path) -> list[str]:
    """Check the tables of a Markdown page, and return their names. Raises UserError if one
    differs from its file."""
    _, names, differing = _drawn(Path(readme), Path(results))
    if differing:
        raise UserError(
            f"{readme} disagrees with the result files of: {', '.join(differing)}. "
            f"Run: python -m flashtrain.report --insert {readme}"
        )
    return names


def table_text(result: ResultFile, view: View) -> str:
    """Return a result as Markdown: its table, then the line of `source_line`."""
    return f"{view.table(result.rows).markdown()}\n{source_line(result)}\n"


def source_line(result: ResultFile) -> str:
    """Return the date, device, versions and command of a result, in one line of Markdown."""
    return f"{_measured(result)} ({_versions(result)}): `{one_line(result.command)}`"


def folded_source(result: ResultFile, page: Path, file: Path) -> str:
    """Return the date and device of a result, and a fold (HTML details) with its versions and
    commands, one command a line."""
    command = _NEXT_COMMAND.sub("\n", one_line(result.command))
    runs = re.match(r"(\w+=\S+ )*(python|bash|for) ", command)
    code = f"```bash\n{command}\n```" if runs else f"`{command}`"
    fold = (
        "<details><summary>Command, versions</summary>\n"
        "\n"
        f"{_versions(result)}\n"
        "\n"
        f"{code}\n"
        "\n"
        "</details>"
    )
    return f"{_measured(result)}.\n\n{fold}"


def linked_source(result: ResultFile, page: Path, file: Path) -> str:
    """Return the date and device of a result, and a link from `page` to the result's table in the
    README.md beside `file`."""
    everything = file.with_name("README.md")
    before, found, _ = everything.read_text(encoding="utf-8").partition(
        f"\n<!-- table: {file.stem} "
    )
    place = file.name
    if found:
        place = f"README.md#{anchor_of(re.findall(r'^#+ (.+)$', before, re.MULTILINE)[-1])}"
    target = f"{os.path.relpath(file.parent, page.parent)}/{place}".replace(os.sep, "/")
    return f"{_measured(result)}: [command, versions and all rows]({target})."


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, the part of a link after '#', as GitHub and mkdocs make
    it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _measured(result: ResultFile) -> str:
    if result.device == "computed":
        return f"Computed {result.date}, not measured"
    return f"Measured {result.date} on {markdown_text(result.device)}"


def _versions(result: ResultFile) -> str:
    return markdown_text(
        ", ".join(f"{name} {version}" for name, version in result.versions.items())
    )


def _drawn(readme: Path, results: Path) -> tuple[str, list[str], list[str]]:
    """Return (the page's text with its tables drawn anew, the tables' names, the names of tables
    that differ from the page's)."""
    text = readme.read_text(encoding="utf-8")
    tables = list(_TABLE.finditer(text))
    if len(_MARKER.findall(text)) != 2 * len(tables):
        raise UserError(
            f"{readme}: a table marker has no partner. "
            "Each <!-- table: NAME --> needs <!-- end table -->."
        )
    wanted = [_wanted(readme, table, results) for table in tables]
    differing = [
        table["name"]
        for table, lines in zip(tables, wanted, strict=True)
        if table["lines"] != lines
    ]
    drawn = iter(wanted)
    page = _TABLE.sub(lambda table: table["marker"] + next(drawn), text)
    return page, [table["name"] for table in tables], differing


def _wanted(readme: Path, table: re.Match[str], results: Path) -> str:
    file = results / f"{table['name']}.json"
    try:
        if not file.is_file():
            raise unknown("result", table["name"], [path.stem for path in results.glob("*.json")])
        options = dict(option.partition("=")[::2] for option in table["options"].split())
        form = options.pop("command", "details")
        if form not in _SOURCES:
            raise unknown("form of the command", form, _SOURCES)
        result = read_result(file)
        return (
            f"{view_of(options).table(result.rows).markdown()}\n"
            f"{_SOURCES[form](result, readme, file)}\n"
        )
    except UserError as error:
        raise UserError(f"{readme}, table {table['name']}: {error}") from error


_SOURCES = {"details": folded_source, "link": linked_source}  # by the marker's `command=`
