"""Put committed results into docs/performance.md, and three of their figures into the README.

``python -m benchmarks.readme`` computes all of it again from the files that the page names; with files, the sections
that those are of come from those alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from isogemm.base.disk import write_whole

from .common import Row, cell, definition_text, measured, sources_text, wrapped
from .cpu.cases import RANDOM
from .cpu.measure import against, of_threads
from .gpu.readme import gpu_section
from .headlines import headlines
from .model.readme import model_section
from .program import program_section
from .quant.readme import quant_section
from .quant_gpu.readme import quant_gpu_section

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
HEADLINES = ("<!-- headlines: begin (generated) -->\n", "<!-- headlines: end -->")

# (words of the page, suite, rows of M; None for all)
LINES = (
    ("float32 square, four layouts", "square", None),
    ("LLM linears, weights in place, M = 1", "llm", (1,)),
    ("LLM linears, weights in place, M = 2 to 16", "llm", (2, 4, 8, 16)),
    ("LLM linears, weights in place, M = 64 to 1024", "llm", (64, 256, 1024)),
    ("LLM linears, packed weights, M = 1", "packed", (1,)),
    ("LLM linears, packed weights, M = 64", "packed", (64,)),
    ("bfloat16 linears, M = 1 and 4", "bf16", (1, 4)),
    ("bfloat16 linears, M = 16 and 64", "bf16", (16, 64)),
    ("batched, 64x64x64 and attention's 512x128x512", "batched", None),
)


def ratios(rows: Sequence[Row], suite: str, ms: Sequence[int] | None, threads: int) -> list[float]:
    """Speed against the fastest peer of each row."""
    wanted = [x for x in rows if x["suite"] == suite and x["threads"] == threads and (ms is None or x["m"] in ms)]
    return [speed for row in wanted if (speed := against(row, "fastest")) is not None]


def section(runs: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """The page's text between the marks."""
    drawn, runs = [run for run in runs if _is_drawn(run)], [run for run in runs if not _is_drawn(run)]
    # A case that a later file measured again counts there alone.
    rows = list({(row["name"], row["threads"]): row for run in runs for row in run["rows"]}.values())
    stamp = runs[0]["environment"]
    every = [*rows, *(row for run in drawn for row in run["rows"])]
    packages, cpu = stamp["packages"], stamp["cpu"]
    versions = " and ".join(f"{name} {packages[name]}" for name in ("numpy", "torch") if name in packages)
    out = [
        f"Speed against the faster of {versions} ({cpu['model']}, {cpu['core']}), geometric mean and range over the",
        "shapes; above 1 isogemm is faster:",
        "",
        "| | 1 thread | 2 threads |",
        "|---|---|---|",
    ]
    out += [f"| {words} | {cell(ratios(rows, s, ms, 1))} | {cell(ratios(rows, s, ms, 2))} |" for words, s, ms in LINES]
    out += _drawn(drawn)
    return "\n".join([*out, "", definition_text(every), *sources_text(sources), ""])


def _is_drawn(run: Mapping[str, Any]) -> bool:
    return all(row["suite"] == RANDOM for row in run["rows"])


def _drawn(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Layers that nobody chose, by the vectors that they were compiled for; nothing where none were measured."""
    if not runs:
        return []
    columns = [(run, threads) for run in runs for threads in sorted({row["threads"] for row in run["rows"]})]
    first = [run["rows"][0] for run, _ in columns]
    targets = [row["plan"]["target"].split(",")[0].upper().replace("AVX512", "AVX-512") for row in first]
    cores = [run["environment"]["cpu"]["core"] for run, _ in columns]
    counts = [f"{threads} thread{'s' * (threads > 1)}" for _, threads in columns]
    how = {
        "cpu": "one thread in the processors' time",
        "quiet": "two by blocks in which they waited for no other program",
    }
    busy = ", ".join(words for clock, words in how.items() if clock in {run.get("clock") for run in runs})
    out = [
        "",
        *wrapped(
            "Layers of float32 drawn at random (N and K from 128 to 4096, M from 1 to 2048), against the faster of "
            "both: geometric mean, 5th percentile and least of so many, compiled for these vectors"
            f"{'; on a busy machine, ' if busy else ''}{busy}:"
        ),
        "",
        f"| | {' | '.join(map(', '.join, zip(targets, cores, counts, strict=True)))} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    found = [of_threads(run["rows"], threads) for run, threads in columns]
    for groups in zip(*found, strict=True):
        cells = (f"{g['mean']:.2f}, {g['low']:.2f}, {g['least']:.2f} of {g['cells']}" for g in groups)
        out.append(f"| {groups[0]['group']} | {' | '.join(cells)} |")
    return out


def marks(name: str) -> tuple[str, str]:
    """What stands around a generated section."""
    return f"<!-- {name}benchmarks: begin (generated) -->\n", f"<!-- {name}benchmarks: end -->"


# (what a file says that it is, the section's mark, who writes it)
SECTIONS = (
    ("cpu", "", section),
    ("gpu", "gpu ", gpu_section),
    ("model", "model ", model_section),
    ("program", "program ", program_section),
    ("quant", "quant ", quant_section),
    ("quant_gpu", "quant gpu ", quant_gpu_section),
)


def named(section: str) -> list[str]:
    """The files that a generated section says it is from."""
    return re.findall(r"`(benchmarks/results/[^`]+)`", section.split("From\n")[-1])


def main(sources: Annotated[list[Path] | None, typer.Argument(help="JSON of benchmarks.")] = None) -> None:
    """Rewrite the page's generated sections after what the files hold, and the README's three figures."""
    text, top = PAGE.read_text(), headlines()
    runs = {str(source.resolve().relative_to(ROOT.resolve())): measured(source) for source in sources or ()}
    for benchmark, mark, write in SECTIONS:
        begin, end = marks(mark)
        chosen = {name: run for name, run in runs.items() if run.get("benchmark", "cpu") == benchmark}
        if not sources:
            chosen = {name: measured(ROOT / name) for name in named(text.split(begin)[1].split(end)[0])}
        if chosen:
            text = between(text, (begin, end), write(list(chosen.values()), list(chosen)))
    write_whole(PAGE, text)
    write_whole(README, between(README.read_text(), HEADLINES, top))


def between(text: str, edges: tuple[str, str], content: str) -> str:
    """`text` with `content` between its two marks."""
    begin, end = edges
    head, rest = text.split(begin)
    return head + begin + content + end + rest.split(end)[1]


if __name__ == "__main__":
    typer.run(main)
