"""Write report.html, a page that shows a run, a sweep or a study, as one file
that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import CONFIG_FILE, SAMPLE
from flashtrain.report.formats import cell, heading
from flashtrain.report.rows import (
    RESULT,
    Row,
    collect_summaries,
    has_failed,
    own_row,
    read_result,
    status_text,
    trainings_of,
)
from flashtrain.report.sweep import sweep_table, with_overrides
from flashtrain.report.table import Table, make_table
from flashtrain.training.metrics_file import METRICS

PAGE = "report.html"
# Keys of a summary row that stand at the top of the page.
_FIRST = (
    "train_loss", "validation_loss", "perplexity", "accuracy", "validation_accuracy", "micro_f1",
    "tokens_per_second",
    "mfu", "peak_memory_gib", "tokens", "steps", "seconds",
)  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
  max-width: 1240px; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
p { margin: .2rem 0; } code { overflow-wrap: anywhere; color: #444; } a { color: #0b6fb8; }
.quiet { color: #666; } .bad { color: #b5364b; font-weight: 600; }
dl.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 0; }
dl.facts div { background: #f4f6f8; border-radius: 6px; padding: .5rem .9rem; }
dl.facts dt { color: #666; font-size: .8rem; } dl.facts dd { margin: 0; font-size: 1.15rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: .5rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr));
  gap: 1.2rem; align-items: start; }
img { max-width: 100%; height: auto; } .curves img { width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .25rem .55rem; border-bottom: 1px solid #e3e3e3;
  vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: break-word; max-width: 34rem; } th.number { text-align: right; }
tr.failed td { color: #b5364b; }
pre { background: #f4f6f8; border-radius: 6px; padding: .8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto; }
"""
# No scripts and no requests.
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""


def write_page(folder: str | Path, row: Row | None = None) -> Path:
    """Write FOLDER/report.html, and return its path.

    Args:
        folder: the folder of a run, a sweep or a study, or one with runs below it.
        row: the summary row of a run whose summary.json is not written yet;
            None: read summary.json.

    Raises:
        UserError: no run is in the folder or below it.
    """
    folder = Path(folder)
    own = row or own_row(folder)
    rows = collect_summaries(folder) if own is None else trainings_of(folder)
    parts = [
        _head(folder, own, rows),
        _section("Curves", _curves(folder)),
        _section("What it writes", _contents(folder / SAMPLE)),
        _section("Results", _results(folder, rows)),
        _section("Settings", _contents(folder / CONFIG_FILE)),
        _section("Files", _files(folder)),
    ]
    return write_atomically(folder / PAGE, "".join(parts) + "</body>\n</html>\n")


def _head(folder: Path, own: Row | None, rows: Sequence[Row]) -> str:
    name = folder.resolve().name
    row = own or {}
    title = ": ".join(cell("", row[key]) for key in ("recipe", "model") if row.get(key)) or name
    text = _HEAD.format(title=escape(f"{title} - {name}"), style=_STYLE)
    text += f"<h1>{escape(title)}</h1>\n"
    if own is None:
        return text + (
            f'<p class="quiet">{escape(name)}: {len(rows)} run{"" if len(rows) == 1 else "s"}</p>\n'
        )
    failed = has_failed(row)
    status = (
        f'<span class="{"bad" if failed else "ok"}">'
        f"{escape(status_text(row) if failed else 'finished')}</span>"
    )
    about = [
        status,
        *(escape(cell(key, row[key])) for key in ("date", "device", "precision") if row.get(key)),
    ]
    text += f"<p>{escape(name)} &middot; {' &middot; '.join(about)}</p>\n"
    if isinstance(row.get("overrides"), str):
        text += f"<p><code>python -m flashtrain {escape(row['overrides'])}</code></p>\n"
    if failed and row.get("error"):
        text += f'<p class="bad">{escape(cell("error", row["error"]))}</p>\n'
    facts = [key for key in _FIRST if isinstance(row.get(key), (int, float))]
    shown = "".join(
        f"<div><dt>{escape(heading(k))}</dt><dd>{escape(cell(k, row[k]))}</dd></div>" for k in facts
    )
    return f'{text}<dl class="facts">{shown}</dl>\n'


def _section(title: str, content: str) -> str:
    """Return a section of the page as HTML; "" if `content` is empty."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}</section>\n" if content else ""


def _curves(folder: Path) -> str:
    if not (folder / METRICS).is_file():
        return ""
    # Imports matplotlib, half a second, only for a page with curves.
    from flashtrain.report.curves import curves

    pictures = [
        _picture(f"{title} against steps", "svg+xml", svg.encode())
        for title, svg in curves(folder / METRICS)
    ]
    return f'<div class="curves">\n{"".join(pictures)}</div>\n' if pictures else ""


def _contents(file: Path) -> str:
    return f"<pre>{escape(file.read_text(encoding='utf-8'))}</pre>\n" if file.is_file() else ""


def _results(folder: Path, rows: Sequence[Row]) -> str:
    """Return the folder's figures and the table of its runs or measurements as HTML."""
    files = sorted(folder.glob("*.png"))
    pictures = "".join(_picture(file.name, "png", file.read_bytes()) for file in files)
    tables = ""
    if (folder / RESULT).is_file():
        tables += _table(make_table(read_result(folder / RESULT).rows))
    if rows:
        table = sweep_table(with_overrides(rows))
        tables += _table(table, links=[_page_of(folder, str(row["run"])) for row in table.rows])
    columns = [f"<div>\n{column}</div>\n" for column in (pictures, tables) if column]
    return f'<div class="columns">\n{"".join(columns)}</div>\n' if columns else ""


def _page_of(folder: Path, run: str) -> str | None:
    """Return the address of the page of a run below the folder; None if the run has no page yet."""
    return f"{_address(run)}/{PAGE}" if (folder / run / PAGE).is_file() else None


def _table(table: Table, links: Sequence[str | None] = ()) -> str:
    """Return the table as HTML; `links` are the addresses that the first cell of each row links to
    (None: no link)."""
    numbers = [table.is_numeric(name) for name in table.columns]
    head = "".join(
        f"<th{_kind(one)}>{escape(name)}</th>"
        for name, one in zip(table.headings, numbers, strict=True)
    )
    lines = []
    for index, (row, cells) in enumerate(zip(table.rows, table.cells, strict=True)):
        shown = [escape(part) for part in cells]
        if index < len(links) and links[index] is not None:
            shown[0] = f'<a href="{links[index]}">{shown[0]}</a>'
        parts = "".join(
            f"<td{_kind(one)}>{part}</td>" for one, part in zip(numbers, shown, strict=True)
        )
        lines.append(f"<tr{' class=failed' if has_failed(row) else ''}>{parts}</tr>\n")
    notes = "".join(f'<p class="bad">{escape(note)}</p>\n' for note in table.notes)
    title = f'<p class="quiet">{escape(table.title)}</p>\n' if table.title else ""
    return (
        f'{title}<div class="wide"><table>\n'
        f"<tr>{head}</tr>\n"
        f"{''.join(lines)}</table></div>\n"
        f"{notes}"
    )


def _kind(is_number: bool) -> str:
    return " class=number" if is_number else ""


def _files(folder: Path) -> str:
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name != PAGE and not path.name.startswith(".")
    )
    lines = (f'<li><a href="{_address(name)}">{escape(name)}</a></li>\n' for name in names)
    return f"<ul>\n{''.join(lines)}</ul>\n"


def _address(name: str) -> str:
    """Return the address of a file of the folder, escaped for HTML."""
    return escape(f"./{quote(name)}")


def _picture(title: str, kind: str, content: bytes) -> str:
    """Return a picture, of the type image/KIND, as HTML that contains it."""
    data = base64.b64encode(content).decode("ascii")
    return f'<img alt="{escape(title)}" src="data:image/{kind};base64,{data}">\n'
