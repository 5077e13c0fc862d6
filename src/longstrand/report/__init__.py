"""A run folder as one HTML file that explains what was learned and how sure that is; no torch."""

from __future__ import annotations

import logging
from pathlib import Path

from longstrand.atomic import write_atomic
from longstrand.errors import UserError
from longstrand.report.findings import find
from longstrand.report.ledger import formats
from longstrand.report.page import page_html
from longstrand.report.plots import plot_loss, plot_positions, plot_run
from longstrand.report.run_folder import read_run_folder
from longstrand.wording import unit_for

__all__ = ["write_report"]

_log = logging.getLogger(__name__)


def write_report(run: Path) -> Path:
    """Writes report.html and plots/*.png, *.svg into the run folder, from what is there so far.

    The page is self-contained. It names the parts that are absent, so a run that is going on has a report too. What is
    wrong in a file that the report can do without is said on the page, and logged as a warning.

    Returns:
        The path of report.html.

    Raises:
        UserError: no run folder, a corrupt file in it, or a file that cannot be written, in one line.
    """
    run = Path(run)
    folder = read_run_folder(run)
    for flaw in folder.flaws:
        _log.warning("%s: %s", run, flaw.removesuffix("."))
    unit = unit_for(folder.setting("data", "tokenizer"), formats(folder.ledger))
    findings = find(folder, unit)
    plots = (plot_positions(folder, findings, unit), plot_loss(folder, unit), plot_run(folder))
    try:
        (run / "plots").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{run / 'plots'}: cannot make the folder: {error.strerror}") from error
    for plot in plots:
        if plot is not None:
            write_atomic(run / "plots" / f"{plot.name}.svg", plot.wide_svg)
            write_atomic(run / "plots" / f"{plot.name}.png", plot.png)
    write_atomic(run / "report.html", page_html(folder, findings, unit, plots))
    return run / "report.html"
