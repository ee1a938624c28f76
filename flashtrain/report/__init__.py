"""Tables, figures and pages, drawn from result files and run folders. The command is `python -m flashtrain.report`."""

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
