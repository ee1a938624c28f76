"""python -m flashtrain.report: tables and figures of result files, run
folders and sweep folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flashtrain.errors import UserError
from flashtrain.files.shipped import recipes_folder
from flashtrain.folders.run_folder import FAILED
from flashtrain.registry import component, registered
from flashtrain.report.page import write_page
from flashtrain.report.readme import check_tables, insert_tables, source_line, table_text
from flashtrain.report.rows import Row, collect_summaries, read_result
from flashtrain.report.save import save_result
from flashtrain.report.sweep import sweep_table, with_overrides
from flashtrain.report.table import OPTIONS, View, view_of
from flashtrain.training.metrics_file import METRICS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. A user's mistake is one line
    on stderr and status 2."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    results = recipes_folder() / "results"
    for readme in options.insert:
        changed = insert_tables(readme, results)
        print(
            f"{readme}: "
            f"{'rewrote ' + ', '.join(changed) if changed else 'every table is up to date'}"
        )
    for readme in options.check:
        print(
            f"{readme}: {len(check_tables(readme, results))} tables agree with their result files"
        )
    if options.insert or options.check:
        return 0
    if not options.sources:
        raise UserError(
            "nothing to report. Give a result file (.json), a run folder or a sweep folder."
        )
    if options.save:
        save_result(options.save, *options.sources)
        print(f"wrote {options.save}")
        return 0
    _draw(options)
    return 0


def _draw(options: argparse.Namespace) -> None:
    results = {source: read_result(source) for source in options.sources if not source.is_dir()}
    view = view_of({key: value for key in OPTIONS if (value := getattr(options, key)) is not None})
    plain = view == View() and not results
    rows: list[Row] = []
    for source in options.sources:
        if one := results.get(source):
            # for a figure's title.
            rows += [{"measured": f"{one.device}, {one.date}", **row} for row in one.rows]
            continue
        found = with_overrides(collect_summaries(source))
        begun = [row for row in found if not _refused(source / row["run"], row)] or found
        if plain and (refused := len(found) - len(begun)):
            print(f"left out: {refused} that failed before a step", file=sys.stderr)
        rows += begun if plain else found
    table = sweep_table(rows) if plain else view.table(rows)
    single = results.get(options.sources[0]) if len(options.sources) == 1 else None
    if options.markdown:
        print(table_text(single, view) if single else table.markdown(), end="")
    else:
        table.print()
        if single:
            print(source_line(single))
    for source in options.sources:
        if source not in results:
            print(_page(source), file=sys.stderr)
    if options.figure:
        path = Path(f"{options.sources[0].resolve().stem}.png")
        print(f"wrote {_figure(options.figure, view.selected(rows), path)}", file=sys.stderr)


def _refused(folder: Path, row: Row) -> bool:
    return row.get("status") == FAILED and not (folder / METRICS).exists()


def _page(folder: Path) -> str:
    """Write the folder's report.html again, and return a line with its path or the reason why it
    could not be written."""
    try:
        return f"wrote {write_page(folder)}"
    except (UserError, OSError) as error:
        return f"no report.html: {error}"


def _figure(name: str, rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    try:
        return cast(Path, component("figure", name)(rows, path))
    except KeyError as missing:
        raise UserError(
            f"--figure {name} needs the key {missing}, which these rows do not have. "
            "Give other results, or another --figure."
        ) from missing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashtrain.report",
        description=(
            "Draw tables and figures from result files (recipes/results/NAME.json) and "
            "run or sweep folders."
        ),
    )
    parser.add_argument("sources", nargs="*", type=Path, metavar="FILE.json|FOLDER")
    parser.add_argument(
        "--columns", metavar="a,b", help="the keys that are the table's columns, in order"
    )
    parser.add_argument(
        "--only", metavar="a:x,b:y", help="only the rows whose key a has the value x, and b y"
    )
    parser.add_argument(
        "--pivot",
        metavar="c",
        help="make a column for each value of key c (needs --columns and --value)",
    )
    parser.add_argument(
        "--value", metavar="d", help="with --pivot: the key whose values fill the cells"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--figure", metavar="NAME", help=f"draw SOURCE.png: {', '.join(registered('figure'))}"
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE.json",
        help="write a run or sweep folder, or several benchmark runs, as one result file",
    )
    parser.add_argument(
        "--insert",
        action="append",
        default=[],
        type=Path,
        metavar="README.md",
        help="redraw the tables between <!-- table: NAME --> and <!-- end table -->",
    )
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        type=Path,
        metavar="README.md",
        help="fail if such a table differs from its result file",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
