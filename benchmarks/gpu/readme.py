"""The figures of the GPU benchmark, from committed results; `benchmarks.readme` puts them there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..common import Row, cell, sources_text, summarize, wrapped
from .cases import GROUPS, PEER, RANDOM
from .measure import against

__all__ = ["gpu_section"]


LINES = (
    ("M = 1 to 16", lambda m: m <= 16),
    ("M = 32 to 512", lambda m: 32 <= m <= 512),
    ("M = 1024 to 4096", lambda m: m >= 1024),
    ("all", lambda m: True),
)
PEERS = (("torch.mm", "torch"), ("torch set to cuBLASLt, split-K off", "cublaslt"), (PEER, PEER))
# (words of the page, the words of the cases)
OTHERS = (
    ("float32 by `tf32x3:sm90/chain`, 4096 cubed", "fp32 tf32x3:sm90/chain"),
    ("float32 by `fma/chain`, 4096 cubed", "fp32 ieee"),
    ("order `leaf4096`, M = 4096 on (4096, 14336)", "leaf NT"),
    ("order `leaf4096`, weight gradient 14336 x 4096 over 8192 tokens", "leaf TN"),
    ("attention, Q K^T and P V", "batched"),
)


MODELS = "chosen by the models"


def gpu_section(runs: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """The page's text between the marks."""
    # A case that a later file measured again counts there alone.
    device = runs[0]["device"]["before"]
    ways = [_way(run, device["name"]) for run in runs]
    measured = {way: _latest(run for run, own in zip(runs, ways, strict=True) if own == way) for way in ways}
    rows = measured.get(MODELS, [])
    llm = [row for row in rows if row["suite"] == "llm"]
    shapes = len({(row["n"], row["k"]) for row in llm})
    packages = device.get("packages", {})
    out = [
        f"Device time on one {device['name']} (driver {device.get('driver_version', 'unknown')}, torch "
        f"{packages.get('torch', 'unknown')}), bfloat16, the linears of two",
        f"language models ({shapes} shapes), weights from memory, in CUDA graphs; geometric mean and range over the",
        "cells, above 1 isogemm is faster:",
        "",
        "| | " + " | ".join(words for words, _ in PEERS) + " |",
        "|---" * (1 + len(PEERS)) + "|",
    ]
    for words, wanted in LINES:
        cells = [row for row in llm if wanted(row["m"])]
        out.append(f"| {words} | " + " | ".join(_cell(cells, peer) for _, peer in PEERS) + " |")
    out += [
        "",
        "torch with split-K off is what its own switches give. Where its pick is poor, cuBLASLt has better algorithms",
        "with K in one piece, which compete among our kernels.",
        "",
        "| against the fastest of torch's own ways | |",
        "|---|---|",
    ]
    for words, key in OTHERS:
        found = [row for row in rows if set(key.split()) <= set(row["name"].split())]
        if found:
            out.append(f"| {words} | {_cell(found, 'torch')} |")
    out += _drawn(measured)
    every = [row for some in measured.values() for row in some]
    return "\n".join([*out, "", *wrapped(_bits(every)), *sources_text(sources), ""])


def _way(run: Mapping[str, Any], here: str) -> str:
    """How a run's products were chosen, and on which other device."""
    name = str(run["device"]["before"]["name"])
    how = "after live tuning" if run.get("tuned") else MODELS
    return how if name == here else f"{how}, {name}"


def _latest(runs: Iterable[Mapping[str, Any]]) -> list[Row]:
    return list({row["name"]: row for run in runs for row in run["rows"] if not row["error"]}.values())


def _drawn(ways: Mapping[str, Sequence[Row]]) -> list[str]:
    """What products give that nobody chose, by how their kernels were chosen; empty where none were measured."""
    drawn = {words: [row for row in rows if row["suite"] == RANDOM] for words, rows in ways.items()}
    if not any(drawn.values()):
        return []
    out = [
        "",
        "Products drawn at random (N and K from 512 to 32768, M from 1 to 8192; four fifths have N and K that are",
        "multiples of 64, a fifth has a bias), in no table, against the fastest of torch's ways:",
        "",
        "| | products | geometric mean | 5th percentile | least |",
        "|---|---|---|---|---|",
    ]
    for words, rows in drawn.items():
        for group in summarize(rows, GROUPS, against):
            if group["cells"]:
                name, figures = group["group"].removeprefix("drawn, "), (group["mean"], group["low"], group["least"])
                cells = " | ".join(f"{x:.2f}" for x in figures)
                out.append(f"| {name}, {words} | {group['cells']} | {cells} |")
    return out


def _cell(rows: Sequence[Row], peer: str) -> str:
    ratios = [x for row in rows if (x := against(row, peer)) is not None]
    return f"{ratios[0]:.2f}" if len(ratios) == 1 else cell(ratios)


def _bits(rows: Sequence[Row]) -> str:
    checks = [row["correctness"] for row in rows if row.get("correctness")]

    def total(*names: str) -> int:
        return sum(check.get(name, 0) for check in checks for name in names)

    return (
        f"Of {total('checked'):,} sampled elements {total('differing')} differ from the definition; of "
        f"{total('batch_checked'):,}, {total('batch_differing')} differ from the same rows in another batch. From"
    )
