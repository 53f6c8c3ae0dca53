"""The page in a real browser, where one is installed: no script error, figures there, on a phone and on a screen."""

from __future__ import annotations

import shutil

import pytest

from isogemm.study.catalog import study
from isogemm.study.engine import RunOptions, run
from isogemm.study.page import page
from isogemm.study.site import open_site

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("vl_convert")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    site = open_site("cpu", ceilings=False)
    found = [run(study(name), site, RunOptions(quick=True)) for name in ("modes", "pointers")]
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(found), encoding="utf-8")
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
        view.wait_for_selector(".chart svg.marks")
        charts, drawn = view.locator(".chart").count(), view.locator(".chart svg.marks").count()
        boxes = [box.bounding_box() for box in view.locator(".chart svg.marks").all()]
        overflow = view.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    assert errors == []
    assert charts == drawn > 0
    assert all(0.6 * width < box["width"] <= width and box["height"] > 200 for box in boxes)
    assert overflow <= 0
