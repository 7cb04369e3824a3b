"""`weftpub report RUN_DIR...`: pictures and a table of one or several runs."""

from weftmoe.report.command import report
from weftmoe.report.draw import draw_runs
from weftmoe.report.summary import RunSummary, summarize_run

__all__ = ["RunSummary", "draw_runs", "report", "summarize_run"]
