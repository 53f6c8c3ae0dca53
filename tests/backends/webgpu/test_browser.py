"""The page that runs the kernels in a browser: on SwiftShader its bits are right.

`pip install playwright` and a Chromium of the system's are enough: ``apt install chromium``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tools.browser_page import page, write

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SOFTWARE = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]


def opened(path: Path, width: int = 1280) -> tuple[str, list[str], list[str], int]:
    """When it has multiplied, the page's state and headings, script errors, and pixels beyond the width."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=SOFTWARE)
        view = browser.new_page(viewport={"width": width, "height": 900})
        errors: list[str] = []
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.goto(f"{path.as_uri()}?n=32&seconds=0.001")
        view.wait_for_function(
            "/done|stopped|wrong/.test(document.getElementById('state').textContent)", timeout=90_000
        )
        state, titles = view.inner_text("#state"), view.locator("h2").all_inner_texts()
        overflow = view.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    return state, titles, errors, overflow


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_has_the_bits_of_the_definition_for_rows_alone_and_in_batches(tmp_path: Path, width: int) -> None:
    write(tmp_path / "page.html")
    state, titles, errors, overflow = opened(tmp_path / "page.html", width)
    assert (state, errors) == ("done", [])
    assert titles[0] == "Every row alone has the bits that it has in a batch"
    assert titles[1].endswith("GFLOP/s")
    assert overflow <= 0


def test_a_kernel_that_loses_a_step_is_seen(tmp_path: Path) -> None:
    whole = "for (var k = 0u; k < p.k; k++) {\\n    acc = multiply_add"
    assert page().count(whole) == 1
    broken = tmp_path / "broken.html"
    broken.write_text(page().replace(whole, whole.replace("k < p.k", "k + 1u < p.k")), encoding="utf-8")
    state, titles, errors, _ = opened(broken)
    assert (state, errors) == ("wrong bits", [])
    assert "outputs have other bits than they should" in titles[0]
