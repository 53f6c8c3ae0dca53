"""Draw the README's picture from an audit's JSON: ``python -m benchmarks.picture``.

Which batch sizes give the rows that they have in common the same bits: a map for torch beside one for isogemm, once for
light pages and once for dark ones. The JSON is what `isogemm audit --json` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import altair as alt
import typer
import vl_convert

from isogemm.audit.figures import EQUAL_COLOUR
from isogemm.audit.results import SCHEMA
from isogemm.base.disk import write_whole
from isogemm.lab import read_json
from isogemm.lab.page import chart_spec, theme

from .common import RESULTS

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
AUDIT = RESULTS / "audit-cpu-znver4-2026-11-23.json"
SHOWN = ("torch", "isogemm")
CHANGED_COLOURS = ("#f4cf7c", "#ec8f52", "#d1495b")
CELL = 18


def picture(report: Mapping[str, Any], names: Sequence[str], *, dark: bool) -> str:
    """The maps as SVG, for a light or a dark page."""
    by_name = {provider["name"]: provider["agreement"] for provider in report["providers"]}
    panels = [_map(name, by_name[name], titled=name == names[0]) for name in names]
    chart = alt.concat(*panels, columns=len(names), spacing=28).resolve_scale(color="shared")
    svg = str(vl_convert.vegalite_to_svg(chart_spec(chart) | {"config": theme(dark=dark)}))
    return svg.replace(
        "<svg ", '<svg shape-rendering="crispEdges" ', 1
    )  # else hairlines between cells, where it is scaled


def _map(name: str, agreement: Mapping[str, Any], *, titled: bool) -> Any:
    sweep = agreement["sweep"]
    rows = [cell | {"differ": 1 - cell["equal"] / cell["outputs"]} for cell in agreement["cells"]]
    pairs = [row for row in rows if row["m"] < row["other"]]
    differ = sum(row["equal"] < row["outputs"] for row in pairs)
    scale = alt.Scale(domain=[0, 1], range=list(CHANGED_COLOURS), interpolate="lab")
    legend = alt.Legend(
        title="teal: every bit equal; else the share of numbers that differ",
        format="%",
        orient="bottom",
        gradientLength=CELL * len(sweep),
        values=[0, 0.5, 1],
        titleLimit=600,
    )
    shares = alt.Color("differ:Q", scale=scale, legend=legend)
    axis = {"ticks": False, "domain": False, "labelOverlap": False}
    title = alt.Title(name, subtitle=f"{differ} of {len(pairs)} pairs of batch sizes disagree", subtitleColor="#7d8791")
    y_title = "against batches of" if titled else None
    return (
        alt.Chart(alt.Data(values=rows), title=title)
        .mark_rect(aria=False)
        .encode(
            x=alt.X("m:O", sort=sweep, title="the same rows in batches of", axis=alt.Axis(labelAngle=-90, **axis)),
            y=alt.Y("other:O", sort=sweep, title=y_title, axis=alt.Axis(**axis)),
            color=alt.when("datum.differ == 0").then(alt.value(EQUAL_COLOUR)).otherwise(shares),
        )
        .properties(width=CELL * len(sweep), height=CELL * len(sweep))
    )


def main(audit: Annotated[Path, typer.Argument(help="JSON of `isogemm audit`.")] = AUDIT) -> None:
    """Write docs/pictures/agreement-light.svg and -dark.svg."""
    PICTURES.mkdir(exist_ok=True)
    for tone in ("light", "dark"):
        drawn = picture(read_json(audit, schema=SCHEMA), SHOWN, dark=tone == "dark")
        write_whole(PICTURES / f"agreement-{tone}.svg", drawn + "\n")


if __name__ == "__main__":
    typer.run(main)
