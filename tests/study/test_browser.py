"""Pages in a real browser, where one is installed: no script error, figures there, on a phone and on a screen.

`pip install playwright` and a Chromium of the system's are enough: ``apt install chromium``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from isogemm.study.page import page, read_runs

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("vl_convert")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of every study whose rows are kept here."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(
        page(read_runs(sorted({path.parent for path in RESULTS.glob("studies-*/*.json")}))), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_figures_are_drawn_and_fit(written, width, scheme):
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors = []
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        view.goto(written.as_uri())
        wanted = view.locator(".chart").count()
        view.wait_for_function(f"document.querySelectorAll('.chart svg.marks').length === {wanted}", timeout=60_000)
        boxes = [box.bounding_box() for box in view.locator(".chart svg.marks").all()]
        colour = view.evaluate("getComputedStyle(document.body).backgroundColor")
        overflow = view.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    assert errors == []
    assert wanted > 10
    assert all(0.6 * width < box["width"] <= width and box["height"] > 200 for box in boxes)
    assert overflow <= 0
    shade = sum(int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 3
    assert (shade > 128) == (scheme == "light")
