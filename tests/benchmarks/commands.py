"""A benchmark's command in this process."""

from __future__ import annotations

from typer import Typer
from typer.testing import CliRunner


def invoke(main, *words):
    """What the function of a command, given these words, printed and ended with."""
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(word) for word in words])
