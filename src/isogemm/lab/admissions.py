"""``isogemm admissions``: which kernels were tried on this machine's GPUs, and what was found. Needs no GPU to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ..base.disk import cache_folder
from ..planner.records import Records


class AdmissionRecord(NamedTuple):
    """A verdict as it was kept."""

    kernel: str  # the family's name
    code: str  # what selected the compiled code; of a product: the configuration, and the variant of products
    state: str  # admitted or refused
    date: str
    device: str
    driver: str
    detail: str  # the first element that differed


def folder() -> Path | None:
    """Where verdicts are kept; None where there is no place for it."""
    return cache_folder("admissions")


def read(place: Path | None) -> Iterator[AdmissionRecord]:
    """All verdicts in a folder; files that are no verdicts are passed over."""
    for key, value in Records(place).each():
        match key:
            case {"kernel": str(kernel), "code": str(code), "stamp": dict(stamp)} if "state" in value:
                where = str(stamp.get("device", "")), str(stamp.get("driver", ""))
                said = value["state"], value.get("date", "")
                yield AdmissionRecord(kernel, code, *said, *where, value.get("detail", ""))


def admissions_command(
    refused: Annotated[bool, typer.Option("--refused", help="Only kernels that had wrong bits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """Show which kernels were tried on this machine's GPUs at first use: products, attention, operations along rows."""
    found = sorted(x for x in read(folder()) if x.state == "refused" or not refused)
    if as_json:
        typer.echo(json.dumps([x._asdict() for x in found], indent=2))
        return
    for x in found:
        typer.echo(f"{x.state:<8}  {x.date}  {x.kernel}  [{x.code}]  on {x.device}, driver {x.driver}")
        if x.detail:
            typer.echo(f"          {x.detail}")
    count = sum(x.state == "refused" for x in found)
    typer.echo(f"{len(found)} kernels on record in {folder()}, {count} of them refused")
