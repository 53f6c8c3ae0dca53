"""The report of an audit: what was found, as text, as JSON and as a page."""

from __future__ import annotations

import io
import json
from pathlib import Path

from ..base.disk import write_whole
from .html import page
from .results import Results


class Report(Results):
    """What an audit found, with the attributes of `isogemm.audit.results.Results`; prints as `isogemm audit` does."""

    def __str__(self) -> str:
        from rich.console import Console

        from .console import print_report  # late, with rich

        text = io.StringIO()
        print_report(self, Console(file=text, width=120))
        return text.getvalue().strip()

    def write_json(self, path: str | Path) -> Path:
        """Write `to_dict` to a file, which appears whole or not at all; missing folders are made."""
        return write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def write_html(self, path: str | Path) -> Path:
        """Write a page with the figures, whole or not at all; it needs no network.

        Raises
        ------
        OptionError
            altair or vl-convert is not installed: they come with the extra ``isogemm[report]``.
        """
        return write_whole(path, page(self).encode(errors="backslashreplace"))
