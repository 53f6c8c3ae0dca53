"""The figures of quantized products on a GPU, from committed results; `benchmarks.readme` puts them there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..common import Row, sources_text, wrapped
from .cases import FP32, OURS, PLAIN, PLAIN_FP32, Q8, RANDOM
from .measure import checks, groups

__all__ = ["quant_gpu_section"]


def quant_gpu_section(runs: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """The page's text between the marks."""
    # A case that a later file measured again counts there alone; beside a peer, in the last file that has the peer.
    timed = [row for run in runs for row in run["rows"] if row["timings"]]
    every = list({row["name"]: row for row in timed}.values())
    rows, drawn = ([row for row in every if (row.get("suite") == RANDOM) == random] for random in (False, True))
    device = runs[0]["device"]["before"]["name"]
    ms = sorted({row["m"] for row in rows})
    out = [
        *wrapped(
            f"On one {device}, bfloat16 activations, speed relative to isogemm's own bfloat16 product in the same run, "
            "weights not in cache: activations as they are (`same`) / as 8-bit integers (`q8`):"
        ),
        "",
        "| n, k | | " + " | ".join(f"M = {m}" for m in ms) + " |",
        "|---" * (2 + len(ms)) + "|",
    ]
    for n, k, fmt in dict.fromkeys((row["n"], row["k"], row["format"]) for row in rows):
        found = {row["m"]: row for row in rows if (row["n"], row["k"], row["format"]) == (n, k, fmt)}
        out.append(f"| {n}, {k} | {fmt} | " + " | ".join(_cell(found.get(m)) for m in ms) + " |")
    peers = [
        f"Relative to llama.cpp's CUDA kernels, which quantize activations, the speed of `same` is "
        f"{_range(timed, OURS, 'llama.cpp')}, that of `q8` {_range(timed, Q8, 'llama.cpp')}; relative to GemLite, "
        f"with the nearest format that it has, `same` {_range(timed, OURS, 'gemlite')}."
    ]
    floats = [row for row in rows if _ratio(row, FP32, PLAIN_FP32)]
    if floats:
        ranges = (
            f"{_range([row for row in floats if row['m'] == m], FP32, PLAIN_FP32)} at M = {m}"
            for m in sorted({row["m"] for row in floats})
        )
        peers.append(
            "The speed of float32 activations as they are (`fp32`) relative to isogemm's float32 product with "
            f"dequantized weights is {', '.join(ranges)}."
        )
    last = [*wrapped(f"{' '.join(peers)} {_bits(every)} From"), *sources_text(sources), ""]
    return "\n".join([*out, "", *_drawn(drawn), *last])


def _drawn(rows: Sequence[Row]) -> list[str]:
    """What products give that nobody chose; empty where none were measured."""
    if not rows:
        return []
    words = "N and K multiples of 256 from 512 to 16384, M from 1 to 512, ten formats"
    out = [
        *wrapped(f"Products drawn at random ({words}), against the same; codes are the integers of a format:"),
        "",
        "| | products | geometric mean | 5th percentile | least |",
        "|---|---|---|---|---|",
    ]
    for group in groups(rows):
        if group["cells"]:
            path, _, name = group["group"].partition(", ")
            figures = " | ".join(f"{group[key]:.2f}" for key in ("mean", "low", "least"))
            out.append(f"| `{path}`, {name} | {group['cells']} | {figures} |")
    return [*out, ""]


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    return " / ".join(f"{v:.2f}" if v else "–" for v in (_ratio(row, OURS, PLAIN), _ratio(row, Q8, PLAIN)))


def _ratio(row: Row, ours: str, peer: str) -> float | None:
    return next((float(v["ratio"]) for v in row["verdicts"] if (v["ours"], v["peer"]) == (ours, peer)), None)


def _range(rows: Iterable[Row], ours: str, peer: str) -> str:
    found = {row["name"]: ratio for row in rows if (ratio := _ratio(row, ours, peer))}.values()
    return f"{min(found):.2f} to {max(found):.2f}" if found else "not measured"


def _bits(rows: Iterable[Row]) -> str:
    counted = [part for row in rows for part in checks(row)]
    plain = "bfloat16 or float32" if any(row["correctness"].get("fp32") for row in rows) else "bfloat16"
    keys = ("", "batch_", "plain_")
    checked = sum(part.get(f"{key}checked", 0) for part in counted for key in keys)
    differing = sum(part.get(f"{key}differing", 0) for part in counted for key in keys)
    return (
        f"Of {checked:,} elements compared with the definition, with the same row in another batch, and with the "
        f"{plain} product of dequantized weights, {differing} differed."
    )
