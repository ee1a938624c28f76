"""Tables and figures, drawn from files and never typed in.

rows.py reads and writes result files (recipes/results/NAME.json) and collects the summary rows of run folders; save.py
makes the one of the other; table.py turns rows into a table for the terminal, Markdown or CSV, long or wide, with the
headings and digits of formats.py; figures.py draws PNGs; sweep.py ends a sweep with table and figure; page.py makes the
report.html of a run, a sweep or a study, with the curves of curves.py; readme.py keeps the tables inside a README equal
to their result files.
`python -m flashtrain.report` is the command over all of them. Public: ResultFile, read_result, write_result,
collect_summaries, Table, make_table, sweep_figure, line_figure, report_sweep, write_page.
"""

from flashtrain.report.figures import line_figure, sweep_figure
from flashtrain.report.page import write_page
from flashtrain.report.rows import ResultFile, collect_summaries, read_result, write_result
from flashtrain.report.sweep import report_sweep
from flashtrain.report.table import Table, make_table

__all__ = [
    "ResultFile",
    "Table",
    "collect_summaries",
    "line_figure",
    "make_table",
    "read_result",
    "report_sweep",
    "sweep_figure",
    "write_page",
    "write_result",
]
