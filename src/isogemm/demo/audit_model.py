"""The audit of the model's own linears, with the weights of its file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..audit import Report

__all__ = ["python_command", "replay_lines", "run", "table"]

PROVIDERS = ("numpy", "isogemm")


def run(folder: Path, report_dir: Path, console: Console) -> tuple[Report, list[Path]]:
    """Audit the six linears of the first layer, and write ``audit.html`` and ``audit.json`` to `report_dir`.

    The other layers have linears of the same shapes; `isogemm audit --weights` takes all of them.
    """
    from .. import audit

    linears = audit.weights_of_file(
        str(folder / "model.safetensors"), match=["*layer.0.*dense.weight", "*layer.0.*self*"]
    )
    with progress_bar(console=console, shown=console.is_terminal) as tell:
        report = audit.run(PROVIDERS, linears, progress=tell)
    return report, [report.write_html(report_dir / "audit.html"), report.write_json(report_dir / "audit.json")]


def table(report: Report) -> Table:
    """Outputs that changed in each relation, by provider."""
    from . import show

    found = show.table(f"Audit of {len(report.shapes)} linears with the model's weights", "relation")
    for name in report.providers:
        found.add_column(f"{name}\noutputs changed", justify="right")
        found.add_column("of", justify="right")
    for relation in next(iter(report.providers.values())).relations:
        cells = [relation]
        for provider in report.providers.values():
            result = provider.relations[relation]
            if result.status in ("n/a", "failed"):
                cells += [result.status, ""]
            else:
                cells += [show.loud(f"{result.changed_outputs}", result.changed_outputs), str(result.outputs)]
        found.add_row(*cells)
    return found


def python_command() -> str:
    """The running interpreter as typed from the current folder: the environment's, which need not be activated."""
    python, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.parent.is_relative_to(here) else python))


def replay_lines(report: Report) -> list[str]:
    """A command that evaluates one changed case again, to be pasted as it is, and how to run the report's others."""
    drifts = [drift for name in report.providers for drift in report.drifts(name)]
    if not drifts:
        return []
    python = python_command()
    pasted = drifts[0].case.command().replace("isogemm audit --replay", f"{python} -m isogemm audit --replay", 1)
    return [
        "See one change again:",
        f"  {pasted}",
        f"The report has more such lines: in place of isogemm, type {python} -m isogemm",
    ]
