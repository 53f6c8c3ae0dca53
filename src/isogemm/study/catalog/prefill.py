"""Prefill: one projection over more and more tokens, where it saturates, and what an odd extent costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from ..charts import bars, lines, points
from ..declare import Figure, Row, Study, StudyCase
from ..products import OPERANDS, LinearProduct
from ..site import Site

N, K = 6144, 2560  # Q, K and V of Qwen3-4B
TOKENS = (1, 4, 16, 64, 256, 1024)
EXTENTS = (256, 251)
SATURATED = 0.9


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """The sweep over tokens, and every mix of 256 and 251."""
    dtype = OPERANDS[site.device]
    n, k = (768, 320) if quick and site.device == "cpu" else (N, K)
    sweep = TOKENS[:-1] if quick else TOKENS
    found = [
        LinearProduct(tokens, n, k, dtype).case(
            site, f"sweep tokens={tokens}", {"part": "sweep", "tokens": tokens}, ("device", "wall")
        )
        for tokens in sweep
    ]
    for m, odd_n, odd_k in product(EXTENTS, repeat=3):
        name, key = f"{m} x {odd_n} x {odd_k}", f"alignment m={m} n={odd_n} k={odd_k}"
        found.append(LinearProduct(m, odd_n, odd_k, dtype).case(site, key, {"part": "alignment", "shape": name}))
    return found


def saturation(rates: Mapping[int, float]) -> int:
    """The fewest tokens that reach nine tenths of the highest rate."""
    top = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= SATURATED * top)


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Rates against tokens with the point of saturation, and times of the odd extents."""
    sweep = [row for row in rows if row["facts"]["part"] == "sweep"]
    odd = [row for row in rows if row["facts"]["part"] == "alignment"]
    return [*([_rates(sweep), _tokens(sweep)] if sweep else []), *([_alignment(odd)] if odd else [])]


def _rates(rows: Sequence[Row]) -> Figure:
    data = [p | {"rate": 2e-9 * p["m"] * p["n"] * p["k"] / p["seconds"]} for p in points(rows)]
    full = {
        way: saturation({p["tokens"]: p["rate"] for p in data if p["way"] == way})
        for way in dict.fromkeys(p["way"] for p in data)
    }
    words = ", ".join(f"{way} at {tokens}" for way, tokens in full.items())
    chart = lines(data, "tokens", "rate", titles=("tokens", "GFLOP/s"), log=(True, True))
    sentence = "Until then the weights' way from memory takes the time; after it, the arithmetic does."
    return Figure(f"Nine tenths of the highest rate, in tokens: {words}", chart, sentence)


def _tokens(rows: Sequence[Row]) -> Figure:
    data = [p | {"rate": p["tokens"] / p["seconds"]} for p in points(rows)]
    ours = {p["tokens"]: p["seconds"] for p in data if p["way"] == "isogemm"}
    if len(ours) > 1:
        some = [tokens for tokens in ours if ours[tokens] <= 1.25 * ours[min(ours)]]
        title = f"{max(some)} tokens take no more than 1.25 times as long as one"
    else:
        title = "Tokens a second"
    chart = lines(data, "tokens", "rate", titles=("tokens", "tokens / s"), log=(True, True))
    return Figure(title, chart, "Tokens a second through this one projection.")


def _alignment(rows: Sequence[Row]) -> Figure:
    data = [p | {"us": 1e6 * p["seconds"]} for p in points(rows)]
    whole = {p["way"]: p["us"] for p in data if p["shape"] == "256 x 256 x 256"}
    worst = max((p for p in data if p["way"] in whole), key=lambda p: p["us"] / whole[p["way"]], default=None)
    title = "Odd extents"
    if worst:
        title = f"{worst['shape']} takes {worst['way']} {worst['us'] / whole[worst['way']]:.3g} times 256 cubed"
    chart = bars(data, "shape", "us", titles=("m x n x k", "microseconds"))
    return Figure(title, chart, "251 is odd: rows of k or n elements no longer begin at 16 bytes.")


STUDY = Study("prefill", "From how many tokens on is a projection bound by arithmetic?", cases, figures)
