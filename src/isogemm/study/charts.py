"""What the studies' figures share: rows as points, and charts that fit a phone and a screen, in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .declare import Row

Point = dict[str, Any]
# Told apart by people who see few colours, on a light page and on a dark one.
COLOURS = ("#2f9e8f", "#e07b39", "#5b7fdb", "#c2549d", "#8a8f98", "#b8a03a", "#8d6bc9", "#d1495b")

SHAPES = ("circle", "diamond", "triangle-up", "cross")
DASHES = ([1, 0], [6, 4], [2, 2], [8, 3, 2, 3])


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows that have times."""
    return [row for row in rows if row["timings"]]


def times(row: Row, clock: str = "") -> Mapping[str, Mapping[str, Any]]:
    """The timings of a row by one clock, the row's own where none is named; empty where it was not timed so."""
    found: Mapping[str, Mapping[str, Any]]
    found = row["timings"] if clock in ("", row["clock"]) else row["clocks"].get(clock, {})
    return found


def points(rows: Sequence[Row], clock: str = "") -> list[Point]:
    """A point for each way of each row: the case's facts, ``way``, and ``seconds`` with its ``low`` and ``high``."""
    return [
        {**row["facts"], "way": way, "seconds": t["median"], "low": t["p5"], "high": t["p95"]}
        for row in rows
        for way, t in times(row, clock).items()
    ]


def lines(
    data: Sequence[Point],
    x: str,
    y: str,
    colour: str = "way",
    *,
    titles: tuple[str, str],
    log: tuple[bool, bool] = (True, False),
) -> Any:
    """Lines with points over one quantity, as wide as the page; `titles` are those of the two axes."""
    import altair as alt

    values = sorted({point[x] for point in data})
    kinds = ["log" if each else "linear" for each in log]
    axis = (
        alt.Axis(values=values, format=",", labelOverlap="greedy", labelSeparation=8, grid=False)
        if log[0]
        else alt.Axis(grid=False)
    )
    base = {"base": 2} if log[0] else {}
    encoding: dict[str, Any] = {
        "x": alt.X(f"{x}:Q", title=titles[0], axis=axis, scale=alt.Scale(type=kinds[0], nice=False, **base)),
        "y": alt.Y(
            f"{y}:Q", title=titles[1], scale=alt.Scale(type=kinds[1], zero=not log[1]), axis=alt.Axis(tickCount=6)
        ),
        "color": _colour(data, colour),
        **_again(data, colour),
        "tooltip": [f"{colour}:N", f"{x}:Q", alt.Tooltip(f"{y}:Q", format=".4~g")],
    }
    needed = {x, y, colour}
    return _sized(_only(data, needed).mark_line(point={"size": 36}, strokeWidth=2).encode(**encoding))


def bars(
    data: Sequence[Point], x: str, y: str, colour: str = "way", *, titles: tuple[str, str], log: bool = False
) -> Any:
    """Groups of bars; with `log` they are points instead, since a bar's length means nothing on a log scale."""
    import altair as alt

    order = list(dict.fromkeys(point[x] for point in data))
    names = _names(data, colour)
    chart = _only(data, {x, y, colour})
    chart = chart.mark_point(filled=True, size=70) if log else chart.mark_bar()
    scale = alt.Scale(type="log" if log else "linear")
    return _sized(
        chart.encode(
            x=alt.X(f"{x}:N", sort=order, title=titles[0], axis=alt.Axis(labelAngle=-30, labelLimit=140)),
            xOffset=alt.XOffset(f"{colour}:N", sort=names),
            y=alt.Y(f"{y}:Q", title=titles[1], scale=scale, axis=alt.Axis(tickCount=6)),
            color=_colour(data, colour),
            tooltip=[f"{x}:N", f"{colour}:N", alt.Tooltip(f"{y}:Q", format=".4~g")],
        )
    )


def roof(data: Sequence[Point], ceilings: tuple[float, float], colour: str, label: str) -> Any:
    """Points of ``intensity`` and ``rate`` (FLOP a byte, GFLOP/s) under a roofline of (bytes, operations) a second."""
    import altair as alt

    memory, peak = ceilings
    ridge = peak / memory
    ends = [min(p["intensity"] for p in data) / 2, ridge, max(ridge, *(p["intensity"] for p in data)) * 2]
    line = [{"intensity": _short(x), "rate": _short(min(x * memory, peak) / 1e9)} for x in ends]
    x = alt.X(
        "intensity:Q",
        title="FLOP / byte",
        scale=alt.Scale(type="log"),
        axis=alt.Axis(format="~g", labelOverlap="greedy"),
    )
    y = alt.Y("rate:Q", title="GFLOP/s", scale=alt.Scale(type="log"), axis=alt.Axis(tickCount=6))
    top = alt.Chart(alt.Data(values=line)).mark_line(strokeDash=[6, 4], color=COLOURS[4]).encode(x=x, y=y)
    tip = [f"{label}:N", f"{colour}:N", alt.Tooltip("intensity:Q", format=".4~g"), alt.Tooltip("rate:Q", format=".4~g")]
    shown = _only(data, {"intensity", "rate", colour, label}).mark_point(filled=True, size=70)
    return _sized(alt.layer(top, shown.encode(x=x, y=y, color=_colour(data, colour), tooltip=tip)))


def _only(data: Sequence[Point], fields: set[str]) -> Any:
    """A chart of the fields it shows and no more: a page has many."""
    import altair as alt

    return alt.Chart(alt.Data(values=[{name: _short(point[name]) for name in sorted(fields)} for point in data]))


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _colour(data: Sequence[Point], field: str) -> Any:
    import altair as alt

    names = _names(data, field)
    chosen = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=names, range=chosen), legend=_legend())


def _again(data: Sequence[Point], field: str) -> dict[str, Any]:
    """Where there are more names than colours, shapes and dashes for those that have a colour of the first ones."""
    import altair as alt

    names = _names(data, field)
    if len(names) <= len(COLOURS):
        return {}
    turns = [i // len(COLOURS) % len(SHAPES) for i in range(len(names))]
    shapes, dashes = (alt.Scale(domain=names, range=[of[i] for i in turns]) for of in (SHAPES, DASHES))
    return {
        "shape": alt.Shape(f"{field}:N", scale=shapes, legend=_legend()),
        "strokeDash": alt.StrokeDash(f"{field}:N", scale=dashes, legend=_legend()),
    }


def _names(data: Sequence[Point], field: str) -> list[Any]:
    return list(dict.fromkeys(point[field] for point in data))


def _legend() -> Any:
    import altair as alt

    return alt.Legend(title=None, orient="bottom", columns=2, labelLimit=180, symbolOpacity=1)


def _sized(chart: Any) -> Any:
    return chart.properties(width="container", height=280)


def words(ratio: float, other: str) -> str:
    """A ratio of speeds in words: ``2.4x faster than X``, ``1.3x slower than X``, ``as fast as X``."""
    if 1 / 1.02 <= ratio <= 1.02:
        return f"as fast as {other}"
    return f"{number(ratio)}x faster than {other}" if ratio > 1 else f"{number(1 / ratio)}x slower than {other}"


def number(value: float, digits: int = 3) -> str:
    """Some digits, or a whole number of thousands: ``0.0123``, ``5,270``."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 1000 else text


def median(row: Row, way: str, clock: str = "") -> float | None:
    """Median seconds of a way by one clock; None where it was not timed so."""
    return times(row, clock).get(way, {}).get("median")
