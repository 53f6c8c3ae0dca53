"""The front page and the site: short, true to the committed figures, and without a link that leads nowhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.headlines import headlines

from benchmarks import picture, readme

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"\]\(([^)\s]+)\)")
WHERE = re.compile(r"https://(?:raw\.githubusercontent\.com|github\.com)/[^/]+/[^/]+/(?:blob/)?main/(.+)")


def test_the_readme_is_short_and_says_words_that_people_search_for():
    assert len(README.splitlines()) <= 150
    for word in ("nondeterminism", "serv", "reinforcement learning", "vLLM", "batch", "temperature 0"):
        assert word in README, word


def test_the_readme_has_the_figures_of_the_committed_files():
    begin, end = readme.HEADLINES
    assert README.split(begin)[1].split(end)[0] == headlines()


def test_the_readme_s_times_and_answers_are_those_of_the_committed_files():
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "first-calls-znver4-2026-11-24.json").read_text())["rows"]
    first, again = ({row["name"]: round(row[when]["seconds"]) for row in rows} for when in ("first", "again"))
    answers = json.loads((results / "demo-znver4-2026-11-24.json").read_text())["answers"]
    changed = {
        name: sum(row["shared"] < row["tokens"] for row in answers if row["provider"] == name)
        for name in ("numpy", "isogemm")
    }
    told = " ".join(README.split())
    for words in (
        f"a first product took {first['product']} s, the model above {first['model']} s",
        f"as in an image, in {first['warm']} s",
        f"`make demo` took {first['demo']} s there the first time, with installing and compiling but without "
        f"downloads, and {again['demo']} s again",
        f"NumPy gives {changed['numpy']} of {len(answers) // 2} answers",
        f"isogemm {changed['isogemm']} of {len(answers) // 2} ",
    ):
        assert words in told, words


@pytest.mark.parametrize(
    ("mark", "write"), [row[1:] for row in readme.SECTIONS], ids=[row[0] for row in readme.SECTIONS]
)
def test_every_table_is_what_its_committed_files_say(mark, write):
    begin, end = readme.marks(mark)
    section = readme.PAGE.read_text().split(begin)[1].split(end)[0]
    names = readme.named(section)
    assert section == write([readme.measured(ROOT / name) for name in names], names)


def _of_an_index() -> str:
    """The README as a package index gets it."""
    text = README
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_on_a_package_index_every_link_is_whole_and_leads_to_a_file_that_is_here():
    text = _of_an_index()
    targets = LINK.findall(text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(targets) > 20
    for target in targets:
        found = WHERE.fullmatch(target)
        assert found, target
        assert (ROOT / found[1].partition("#")[0]).is_file(), target
    for url in PROJECT["project"]["urls"].values():
        found = WHERE.fullmatch(url)
        assert not found or (ROOT / found[1]).is_file(), url


def _anchors(page: Path) -> set[str]:
    """Of a page's headings, as a forge and MyST make them; of an HTML page, its sections'."""
    if page.suffix == ".html":
        return set(re.findall(r'<section id="([^"]+)"', page.read_text()))
    titles = re.findall(r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda page: page.stem
)
def test_every_anchor_exists(page):
    for target in LINK.findall(page.read_text()):
        path, mark, anchor = target.partition("#")
        if mark and not path.startswith("http"):
            assert anchor in _anchors(page.parent / path if path else page), target


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("torch")
    words = ["-q", "-W", "--keep-going", "-b", "dummy", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("tone", ["light", "dark"])
def test_the_picture_is_drawn_from_the_committed_audit(tone):
    drawn = picture.picture(picture.read_json(picture.AUDIT, schema=picture.SCHEMA), picture.SHOWN, dark=tone == "dark")
    committed = (picture.PICTURES / f"agreement-{tone}.svg").read_text()
    # Positions of text depend on the fonts of the machine; colours of cells and words do not.
    for what in (r'fill="(?:#|rgb)[^"]+"', r"<text[^>]*>([^<]*)<"):
        assert re.findall(what, drawn) == re.findall(what, committed)
    words = "".join(re.findall(r"<text[^>]*>([^<]*)<", committed))
    assert "68 of 120 pairs of batch sizes disagree" in words
    assert "68 of 120 pairs" in README
