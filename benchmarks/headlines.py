"""The README's figures: what isogemm gives, a line each, with the committed files that they were computed from."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .common import RESULTS, cell, measured, summarize
from .cpu.measure import of_threads
from .gpu.cases import ALIGNED, PEER
from .gpu.measure import against
from .model.build import TORCH
from .model.cases import MAIN_GRAD, WHOLE
from .model.readme import changed

__all__ = ["headlines"]

MODEL, MODEL_COMPILED = "gpu-h200-2026-11-29-model.json", "gpu-h200-2026-11-29-model-compiled.json"
GPU = "gpu-h200-2026-12-01.json"
# Days and seeds of drawn products whose kernels the models chose, and those of which they were timed live.
CHOSEN = tuple(("2026-11-30", seed) for seed in (1201, 1203, 1211))
TIMED = tuple(("2026-11-30", seed) for seed in (1202, 1212, 1213))
CPU = {
    "AVX-512 (Zen 5)": "cpu-znver5-2026-11-30-random-9011.json",
    "AVX-512 (Zen 4)": "cpu-znver4-2026-11-28-random-2071.json",
    "AVX-512 (a Xeon)": "cpu-xeon-2026-11-29-random-2091.json",
    "AVX2 (Zen 3)": "cpu-znver3-2026-11-25-random-3032.json",
}
COMPILED = "compiled decode compile-graph batch=8 tokens=1 layers=all"


def headlines() -> str:
    """The README's text between its marks."""
    return "".join(_item(words) for words in (_bits(), _gradients(), _gpu(), _cpu()))


def _bits() -> str:
    rows = _rows(MODEL)
    return (
        "**The same answer, whoever else is served.** With other prompts beside it, "
        f"{changed(rows, 'model', TORCH)} logits of a language model change in torch, and "
        f"{changed(rows, 'model', WHOLE)} after `convert` ({_link('H200', MODEL)})."
    )


def _gradients() -> str:
    rows = _rows(MODEL)
    return (
        "**The same gradients, however the batch is cut.** In two halves "
        f"{changed(rows, 'train', TORCH)} weight gradients change in torch, "
        f"{changed(rows, 'train', MAIN_GRAD)} with `use_main_grad` ({_link('H200', MODEL)})."
    )


def _gpu() -> str:
    linears = [row for row in _rows(GPU) if row["suite"] == "llm"]
    torch, peer = ([x for row in linears if (x := against(row, name))] for name in (TORCH, PEER))
    compiled = next(row for row in _rows(MODEL_COMPILED) if row["name"] == COMPILED)
    whole = next(v["ratio"] for v in compiled["verdicts"] if v["ours"] == WHOLE)
    chosen = [f"gpu-h200-{day}-random-{seed}.json" for day, seed in CHOSEN]
    timed = [f"gpu-h200-{day}-random-{seed}-tuned.json" for day, seed in TIMED]
    return (
        "**Speed on a GPU.** 16-bit products of sizes drawn at random (N and K multiples of 8), against the fastest of "
        f"torch's ways, in the geometric mean: {_drawn(chosen)} with kernels that a cost model chose, {_drawn(timed)} "
        "others with kernels timed at run time ([H200s, six draws](docs/performance.md#products-on-a-gpu)). bfloat16 "
        f"linears of language models, from a table: {cell(torch)} times torch's speed, {cell(peer)} times that of "
        f"{PEER}, geometric mean and range ({_link('H200', GPU)}). A whole model decodes eight sequences at "
        f"{whole:.2f} times the speed of torch compiled, in CUDA graphs ({_link('H200', MODEL_COMPILED)})."
    )


def _drawn(names: Sequence[str]) -> str:
    """The geometric mean of aligned products of 16 bits, over several files, and of how many."""
    rows = [row for name in names for row in _rows(name)]
    found = summarize(rows, (ALIGNED,), against)[0]
    return f"{found['mean']:.2f} over {found['cells']}"


def _cpu() -> str:
    found = {name: of_threads(_rows(name), 1)[0] for name in CPU.values()}
    means = [f"{found[name]['mean']:.2f} with {_link(vectors, name)}" for vectors, name in CPU.items()]
    return (
        "**Speed on a CPU.** float32 layers of sizes drawn at random, on one thread, against the faster of NumPy and "
        f"torch, in the geometric mean: {', '.join(means[:-1])} and {means[-1]}."
    )


def _rows(name: str) -> list[Mapping[str, Any]]:
    return list(measured(RESULTS / name)["rows"])


def _link(words: str, name: str) -> str:
    return f"[{words}](benchmarks/results/{name})"


def _item(words: str) -> str:
    """A line of a list."""
    return (
        textwrap.fill(
            words, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        + "\n"
    )
