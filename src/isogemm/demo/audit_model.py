"""The audit of the model's own linears, with the weights of its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..audit import Report

__all__ = ["run", "table"]

PROVIDERS = ("numpy", "isogemm")


def run(folder: Path, report_dir: Path, console: Console) -> tuple[Report, list[Path]]:
    """Audit the six linears of the first layer, and write ``audit.html`` and ``audit.json`` to `report_dir`.

    The other layers have linears of the same shapes; `isogemm audit --weights` takes all of them.
    """
    from .. import audit

    linears = audit.weights_of_file(
        str(folder / "model.safetensors"), match=["*layer.0.*dense.weight", "*layer.0.*self*"]
    )
    columns = (TextColumn("      {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")

        def tell(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

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
