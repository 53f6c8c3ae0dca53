"""``python -m benchmarks.ranks bits``, ``layers`` and ``model``."""

from __future__ import annotations

import typer

from . import bits, layers, model

app = typer.Typer(no_args_is_help=True, help=__doc__)
app.command("bits")(bits.main)
app.command("layers")(layers.main)
app.command("model")(model.main)

if __name__ == "__main__":
    app()
