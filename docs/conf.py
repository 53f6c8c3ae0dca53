"""The site: ``make docs`` builds it into build/docs. Pages are Markdown, the reference comes from docstrings."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]
os.environ.setdefault("ISOGEMM_QUIET", "1")

from tools import browser_page  # noqa: E402

from isogemm import __version__  # noqa: E402

project = "isogemm"
author = "The isogemm authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "isogemm"
html_show_sphinx = False
html_show_copyright = False

autodoc_mock_imports = ["transformers"]  # TrainerCallback is one of its classes; the site needs no more of it
autodoc_typehints = "none"  # numpydoc says the types
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False

MORE = "% pages that are in no list above"
LISTED = re.compile(r"^[\w/-]+\*?$", re.M)


def setup(app: Any) -> None:
    """Sphinx's hook: the start page's lists are made of the pages that there are, and one page is made of kernels."""
    app.connect("source-read", _complete)
    app.connect("build-finished", lambda app, error: browser_page.write(Path(app.outdir, "browser", "webgpu.html")))


def _complete(app: Any, name: str, source: list[str]) -> None:
    """Put the pages of a pattern, as ``design/*``, in its place, and those that no list has into the last one."""
    if name == "index":
        pages = sorted(app.env.found_docs - {"index"})
        listed = {
            entry: [page for page in pages if re.fullmatch(entry.replace("*", "[^/]*"), page)]
            for entry in LISTED.findall(source[0])
        }
        text = LISTED.sub(lambda entry: "\n".join(listed[entry.group()]), source[0])
        named = {page for found in listed.values() for page in found}
        source[0] = text.replace(MORE, "\n".join(page for page in pages if page not in named))
