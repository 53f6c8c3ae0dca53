"""The documentation is true: its Python runs, its paths exist, its commands and names are there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(?P<mark>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=mark)[ \t]*$", re.M | re.S)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Files and folders that the documentation speaks of by their path from the root.
CITED = re.compile(r"(?:src|tests|docs|benchmarks|\.ci)/[\w./*-]*|[\w-]+\.(?:md|toml)|Makefile|LICENSE")
NAME = re.compile(r"isogemm(?:\.[A-Za-z_]\w*)+")
SCHEMA = re.compile(r"isogemm\.\w+\.v\d+")


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """(line, body) of the page's fenced blocks in these languages."""
    text = page.read_text(encoding="utf-8")
    found = ((m, text.count("\n", 0, m.start("body"))) for m in FENCE.finditer(text))
    return [(line, m["body"]) for m, line in found if (m["info"].split() or [""])[0] in languages]


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _commands(page: Path, program: str) -> Iterator[str]:
    for _, body in _blocks(page, "sh", "bash", "console"):
        for line in body.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").split("#")[0].strip()
            if command.split(" ")[0] == program:
                yield command


WITH_PYTHON = [page for page in PAGES if _blocks(page, "python")]


def test_there_is_something_to_test():
    assert {"README.md", "docs/determinism.md", "CONTRIBUTING.md"} <= {_id(page) for page in PAGES}
    assert {"README.md", "docs/determinism.md"} <= {_id(page) for page in WITH_PYTHON}


def test_the_first_example_fails_without_its_one_line():
    pytest.importorskip("transformers")
    (_, body), *_ = _blocks(ROOT / "README.md", "python")
    line = next(line for line in body.splitlines() if line.startswith("isogemm.torch.convert"))
    with pytest.raises(AssertionError):
        exec(compile(body.replace(line, ""), "README.md", "exec"), {})


@pytest.fixture
def _levels() -> Iterator[None]:
    """Pages show how loggers are silenced: for a reader's process, not for this one."""
    ours = logging.getLogger("isogemm")
    level = ours.level
    yield
    ours.setLevel(level)


@pytest.mark.usefixtures("_levels")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=_id)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, body in _blocks(page, "python"):
        # Blank lines first, so that a traceback names the page's own line.
        code = compile("\n" * line + body, str(page), "exec")
        with contextlib.redirect_stdout(None):
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_path_cited_exists(page):
    prose = _prose(page)
    missing = []
    for target in LINK.findall(prose):
        if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.split("#")[0]).exists():
            missing.append(target)
    for span in INLINE.findall(prose):
        cited = span.split("::")[0]
        if CITED.fullmatch(cited) and not list(ROOT.glob(cited.rstrip("/"))):
            missing.append(span)
    assert not missing, f"{_id(page)} cites what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_name_cited_exists(page):
    for span in INLINE.findall(_prose(page)):
        match = NAME.match(span)
        if match and not SCHEMA.fullmatch(span):
            assert _resolves(match.group()), f"{_id(page)}: no {match.group()}"


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        with contextlib.suppress(AttributeError):
            functools.reduce(getattr, parts[cut:], found)
            return True
        return False
    return False


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_make_target_exists(page):
    makefile = (ROOT / "Makefile").read_text()
    spans = [span for span in INLINE.findall(_prose(page)) if span.startswith("make ")]
    for command in [*spans, *_commands(page, "make")]:
        target = command.split()[1]
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"{_id(page)}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_option_of_our_commands_exists(page):
    import typer

    from isogemm.cli.commands import app

    group = typer.main.get_command(app)
    spans = [span for span in INLINE.findall(_prose(page)) if re.match(r"isogemm [a-z]", span)]
    for command in [*spans, *_commands(page, "isogemm")]:
        words, found = command.split()[1:], group
        while words and not words[0].startswith("-") and hasattr(found, "commands"):
            assert words[0] in found.commands, f"{_id(page)}: no command {words[0]}: {command}"
            found = found.commands[words.pop(0)]
        known = {option for param in found.params for option in (*param.opts, *param.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
        assert used <= known, f"{_id(page)}: {sorted(used - known)} of {command}"


def test_the_legend_of_a_plan_has_every_line_and_every_kernel():
    import isogemm
    from isogemm.backends.cuda.gemm.choose import FAMILIES

    page = (ROOT / "docs" / "gpu.md").read_text()
    legend = page.split("### A plan, word by word", 1)[1].split("\n## ", 1)[0]
    cells = [re.findall(r"`([^`]+)`", row) for row in re.findall(r"^\| (`[^|]+) \|", legend, re.M)]
    words = {word for cell in cells for word in cell}
    extents = {"m": 16, "n": 256, "k": 256, "dtype": "bfloat16"}
    forms = ({}, {"batch": 2}, {"groups": (4, 12)}, {"format": "Q4_K"}, {"heads": (8, 2), "k": 64})
    lines = {
        name.strip().partition(" 0")[0] for device in ("cpu", "H200") for form in forms
        for name, _ in isogemm.plan(device=device, **extents | form).rows() if not name.startswith("...")
    }  # fmt: skip
    lines -= {"group 1"}
    assert len(lines) > 20
    assert lines <= words, lines - words
    assert set(FAMILIES.rows) <= words, set(FAMILIES.rows) - words


def test_the_audit_page_lists_every_relation():
    from isogemm.audit import RELATIONS

    rows = re.findall(r"^\| ([a-z]+) \|", (ROOT / "docs" / "audit.md").read_text(), re.M)
    assert rows == ["relation", *RELATIONS]
