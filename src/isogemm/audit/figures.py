"""The figures of an audit's page, as Vega-Lite charts: agreement map, drift histogram, speed bars.

Each returns None where there is nothing to show. Colours that mean something are the same in light and dark; text,
axes and background come from `isogemm.lab.page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from .cases import ULP_BINS
from .results import ProviderResult, Results

EQUAL_COLOUR = "#3b9c8f"
_CHANGED_COLOURS = ("#f4cf7c", "#ec8f52", "#d1495b", "#8c2155")
# Away from the map's colours: teal is equal bits and warm is changed bits, whoever's they are.
_PROVIDER_COLOURS = ("#4c6fd6", "#a070d0", "#7d8597", "#3aa5dc", "#c77fb3", "#2f4a8a")


def provider_colours(report: Results) -> dict[str, str]:
    """A colour for each provider, in the order of the report."""
    names = list(report.providers)
    return {name: _PROVIDER_COLOURS[i % len(_PROVIDER_COLOURS)] for i, name in enumerate(names)}


def _by_provider(report: Results, names: Sequence[str]) -> Any:
    """Colours of some of the providers, with a legend."""
    colours = provider_colours(report)
    scale = alt.Scale(domain=names, range=[colours[name] for name in names])
    return alt.Color("provider:N", scale=scale, legend=alt.Legend(title=None, orient="top"))


def agreement_map(report: Results) -> Any | None:
    """M x M per provider: the share of the common rows' outputs whose bits differ."""
    shown = [p for p in report.providers.values() if p.agreement.total.any()]
    if not shown:
        return None
    sweep = list(shown[0].agreement.sweep)
    step = max(9, min(24, (300 if len(shown) > 2 else 400) // len(sweep)))
    size = step * len(sweep)
    panels = [_agreement_panel(p, sweep, size, titled=p is shown[0]) for p in shown]
    return alt.concat(*panels, columns=3).resolve_scale(color="shared")


def _agreement_panel(result: ProviderResult, sweep: Sequence[int], size: int, *, titled: bool) -> Any:
    rows = [
        cell
        | {
            "changed": 1 - cell["equal"] / cell["outputs"],
            "differ": cell["outputs"] - cell["equal"],
            "all": "equal bits" if cell["equal"] == cell["outputs"] else "",
        }
        for cell in result.agreement.cells()
    ]
    scale = alt.Scale(domain=[0, 1], type="sqrt", range=list(_CHANGED_COLOURS), interpolate="lab")
    legend = alt.Legend(
        title="share of outputs that differ",
        format="%",
        orient="bottom",
        gradientLength=260,
        values=[0.01, 0.1, 0.3, 1],
    )
    colour = (
        alt.when("datum.all != ''")
        .then(alt.value(EQUAL_COLOUR))
        .otherwise(alt.Color("changed:Q", scale=scale, legend=legend))
    )
    tooltip = [
        alt.Tooltip("m:O", title="batch of"),
        alt.Tooltip("other:O", title="against batch of"),
        alt.Tooltip("outputs:Q", title="outputs of common rows", format=","),
        alt.Tooltip("differ:Q", title="that differ", format=","),
    ]
    every = sweep if len(sweep) <= 24 else sweep[::2]
    axis = alt.Axis(labelAngle=0, ticks=False, domain=False, values=every, labelOverlap=False)
    return (
        alt.Chart(alt.Data(values=rows), title=result.name)
        .mark_rect()
        .encode(
            x=alt.X(
                "m:O",
                sort=sweep,
                title="batch size M",
                axis=alt.Axis(labelAngle=-90, ticks=False, domain=False, values=every),
            ),
            y=alt.Y("other:O", sort=sweep, title="batch size M" if titled else None, axis=axis),
            color=colour,
            tooltip=tooltip,
        )
        .properties(width=size, height=size)
    )


def drift_histogram(report: Results) -> Any | None:
    """Changed outputs by distance in ULPs, for each provider that changed any."""
    shown = [p for p in report.providers.values() if sum(p.histogram)]
    if not shown:
        return None
    used = [i for i in range(len(ULP_BINS)) if any(p.histogram[i] for p in shown) or 1 <= i < len(ULP_BINS) - 1]
    bins = [ULP_BINS[i] for i in used]
    rows = [{"provider": p.name, "ulps": ULP_BINS[i], "outputs": p.histogram[i]} for p in shown for i in used]
    names = [p.name for p in shown]
    axis = alt.Axis(format=",.0f", values=[0, 1, 10, 100, 1000, 10**4, 10**5, 10**6, 10**7, 10**8], tickCount=6)
    return (
        alt.Chart(alt.Data(values=[r for r in rows if r["outputs"]]))
        .mark_bar(cornerRadiusTopLeft=2, cornerRadiusTopRight=2)
        .encode(
            x=alt.X(
                "ulps:O", sort=bins, scale=alt.Scale(domain=bins), title="distance in ULPs", axis=alt.Axis(labelAngle=0)
            ),
            y=alt.Y("outputs:Q", scale=alt.Scale(type="symlog", constant=1), title="changed outputs (log)", axis=axis),
            xOffset=alt.XOffset("provider:N", sort=names),
            color=_by_provider(report, names),
            tooltip=["provider:N", alt.Tooltip("ulps:O", title="ULPs"), alt.Tooltip("outputs:Q", format=",")],
        )
        .properties(width=760, height=240)
    )


def speed_bars(report: Results) -> Any | None:
    """Speed relative to the fastest provider by batch size, a panel per linear, with the 5th to 95th percentile."""
    if not report.speeds:
        return None
    rows = []
    for s in report.speeds:
        best = s.median / s.against_fastest
        rows.append(
            {
                "provider": s.provider,
                "shape": f"{s.shape}  [{s.n} x {s.k}]",
                "m": s.m,
                "speed": best / s.median,
                "low": best / s.p95,
                "high": best / s.p5,
                "time": f"{s.median * 1e3:.3g} ms",
                "label": f"{s.median * 1e3:.3g} ms" + (" ?" if s.verdict == "AMBIGUOUS" else ""),
                "verdict": s.verdict.lower(),
            }
        )
    names = [name for name in report.providers if any(r["provider"] == name for r in rows)]
    colour, shapes = _by_provider(report, names), list(dict.fromkeys(str(r["shape"]) for r in rows))
    # room for the whiskers and the numbers above them
    top = 1.5 * max(s.median / s.against_fastest / s.p5 for s in report.speeds)
    panels = [_speed_panel([r for r in rows if r["shape"] == shape], shape, names, colour, top) for shape in shapes]
    return alt.concat(*panels, columns=2).resolve_scale(color="shared", y="shared")


def _speed_panel(rows: list[dict[str, Any]], shape: str, names: list[str], colour: Any, top: float) -> Any:
    sizes = list(dict.fromkeys(r["m"] for r in rows))
    x = alt.X("m:O", sort=sizes, title="batch size M", axis=alt.Axis(labelAngle=0))
    offset = alt.XOffset("provider:N", sort=names, scale=alt.Scale(domain=names))
    tooltip = ["provider:N", "m:O", alt.Tooltip("time:N", title="median"), "verdict:N"]
    data = alt.Chart(alt.Data(values=rows), title=shape)
    limit = alt.Scale(domain=[0, top], nice=False)
    y = alt.Y(
        "speed:Q", title="speed, fastest = 1", scale=limit, axis=alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format=".2f")
    )
    bars = data.mark_bar(cornerRadiusTopLeft=2, cornerRadiusTopRight=2).encode(
        x=x, xOffset=offset, y=y, color=colour, tooltip=tooltip
    )
    spread = data.mark_rule(strokeWidth=1, opacity=0.6).encode(
        x=x, xOffset=offset, y=alt.Y("low:Q", scale=limit), y2="high:Q", tooltip=tooltip
    )
    times = data.mark_text(align="left", baseline="middle", angle=270, dx=4, fontSize=10).encode(
        x=x, xOffset=offset, y=alt.Y("high:Q", scale=limit), text="label:N", tooltip=tooltip
    )
    return (bars + spread + times).properties(width=430, height=200)
