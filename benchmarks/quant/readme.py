"""The figures of quantized products on a CPU, from committed results; `benchmarks.readme` puts them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common import Row, cell, definition_text, sources_text
from .measure import FORMATS, PEERS, ROWS, SHAPES

__all__ = ["quant_section"]


def quant_section(runs: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """The page's text between the marks."""
    # A case that a later file measured again counts there alone.
    rows = list({(row["name"], row["threads"]): row for run in runs for row in run["rows"]}.values())
    cpu, version = runs[0]["environment"]["cpu"], runs[0]["llama"]["ggml"]
    threads = sorted({row["threads"] for row in rows})
    shapes = ", ".join(f"({n}, {k})" for n, k in SHAPES)
    out = [
        f"Speed against the faster of llama.cpp's CPU kernels (ggml {version}, built for this machine: those for",
        f"blocks as they are in a file, and those for repacked ones), float32 activations, {cpu['model']}",
        f"({cpu['core']}), on (n, k) = {shapes}; geometric mean and range, above 1 isogemm is faster:",
        "",
        "| | " + " | ".join(f"M = {m}, {_plural(t)}" for t in threads for m in ROWS) + " |",
        "|---" * (1 + len(threads) * len(ROWS)) + "|",
    ]
    for fmt in FORMATS:
        cells = [
            _cell([r for r in rows if (r["format"], r["m"], r["threads"]) == (fmt, m, t)])
            for t in threads
            for m in ROWS
        ]
        out.append(f"| {fmt} | " + " | ".join(cells) + " |")
    return "\n".join([*out, "", definition_text(rows), *sources_text(sources), ""])


def _plural(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _cell(rows: Sequence[Row]) -> str:
    """Against the faster peer of each row: geometric mean and range."""
    return cell([min(v["ratio"] for v in row["verdicts"] if v["peer"] in PEERS) for row in rows])
