"""A page that opens offline, with its figures inside: what the audit's and the studies' pages have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..base.extras import require_extra

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"


def require_packages() -> None:
    """Check that the packages of a page are installed; else an `OptionError` names the extra that brings them."""
    require_extra("report", "the page", "altair", "vl_convert")


def whole_page(title: str, body: str, specs: Mapping[str, Any]) -> str:
    """HTML, styles, scripts and figures in one file.

    In the body ``<div id="NAME" class="chart">`` is where a figure goes; `specs` has them by these names, as Vega-Lite
    from `chart_spec`. Raises OptionError: the extra ``isogemm[report]`` is not installed.
    """
    require_packages()
    return Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        body=body,
        specs=_script_json(specs),
        themes=_script_json({"light": theme(dark=False), "dark": theme(dark=True)}),
        bundle=_bundle(),
    )


def chart_spec(chart: Any) -> Any:
    """An altair chart as Vega-Lite; its colours of text and axes are the page's."""
    import altair as alt

    with alt.data_transformers.disable_max_rows():
        spec = chart.to_dict()
    spec.pop("config", None)
    return spec


def theme(*, dark: bool) -> dict[str, Any]:
    """Vega-Lite configuration for a light or a dark page; the background is the page's."""
    text, quiet, grid = ("#e7e9ec", "#a3abb5", "#343a42") if dark else ("#1d2329", "#5c6670", "#e3e6ea")
    title = {"color": text, "fontSize": 13, "fontWeight": 600, "anchor": "start"}
    axis = {"labelColor": quiet, "titleColor": quiet, "domainColor": grid, "tickColor": grid, "gridColor": grid}
    return {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": axis | {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12},
        "header": {"labelColor": text, "titleColor": text, "labelFontSize": 13, "labelFontWeight": 600},
        "legend": {"labelColor": quiet, "titleColor": quiet, "titleFontWeight": "normal"},
        "title": title,
        "text": {"color": text},
        "rule": {"color": text},
    }


def machine_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """What a reader wants to know of `isogemm.lab.environment`."""
    e = environment
    pools = "; ".join(
        " ".join(str(p[key]) for key in ("internal_api", "version", "architecture") if p.get(key))
        + f" with {p.get('num_threads')} threads"
        for p in e["pools"]
    )
    return {
        "processor": f"{e['cpu']['model']}, {e['cpu']['usable']} usable CPUs, {e['cpu']['core']}",
        "libraries": ", ".join(f"{name} {version}" for name, version in e["packages"].items()),
        "thread pools": pools,
        "measured": f"{e['date']}, load {e['load']}",
        "command": e["command"],
    }


def definitions(facts: Mapping[str, Any]) -> str:
    """The inside of a ``<dl>``."""
    return "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())


def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script; a closing tag inside it would end the script element."""
    import vl_convert

    make: Any = vl_convert.javascript_bundle  # its stub demands an argument that it does not need
    return str(make()).replace("</script", "<\\/script")


def _script_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False).replace("</", "<\\/")
