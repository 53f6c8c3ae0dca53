"""Run by test_worlds.py: four processes that compare groups of 1, 2 and 4 with a process alone.

    python -m tests.distributed.worlds [layers] [models] [training] [broken] [benchmark]

Each rank prints how many elements of its part differ, comparison by comparison. All that the processes need is made
before they are forked.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tests.distributed.launch import ranks
from tests.distributed.worlds.broken import broken
from tests.distributed.worlds.layers import parallel_layers
from tests.distributed.worlds.memory import through_memory
from tests.distributed.worlds.models import audited, compiled, loaded, models, plain
from tests.distributed.worlds.parts import BF16, F32
from tests.distributed.worlds.training import TRAINED, alone, branches, training, wrapped

import isogemm


def benchmarked(rank):
    """benchmarks.ranks of two processes: its equality, and times of isogemm's and torch's ways."""
    from benchmarks.model.cases import Sizes, tiny
    from benchmarks.ranks.bench import Bench, Settings
    from benchmarks.ranks.launch import World
    from benchmarks.ranks.model import CASES, EQUAL
    from benchmarks.ranks.show import lines, table

    world, short = World(rank, 2, "cpu", dist.group.WORLD), {"rounds": 5, "block_seconds": 1e-3}
    bench = Bench(world, Settings(2, "cpu", ("collective",), Sizes.of_tests(), (), (), **short))
    rows = [row for case in EQUAL for row in bench.compared(tiny(case))]
    rows.append(bench.timed(tiny(CASES[0])))
    for row in rows:
        of = len(row["timings"]) if "timings" in row else row["compared"]
        said = {"error": row["error"], "said": lines(row)}
        yield {"what": f"benchmark {row['name']}", "of": of, "differ": row["differing"], **said}
    yield {"what": "benchmark table", "rows": table(rows).row_count}


CHECKS = {
    "layers": [parallel_layers, through_memory],
    "models": [models, loaded, audited, compiled],
    "training": [training, wrapped],
    "branches": [branches],
    "broken": [broken("dies"), broken("hangs")],
    "benchmark": [benchmarked],
}


def together(names):
    """The checks of these names, one after another in the same processes: each process loads a kernel once."""

    def check(rank):
        for name in names:
            for each in CHECKS[name]:
                yield from each(rank)

    return check


if __name__ == "__main__":
    torch.set_num_threads(1)
    isogemm.set_num_threads(1)
    wanted = sys.argv[1:] or list(CHECKS)
    for family in ("Qwen3", "Llama") if {"models", "training"} & set(wanted) else ():
        for dtype in (F32, BF16):
            plain(family, dtype)
    for family, dtype in TRAINED if {"models", "training"} & set(wanted) else ():
        alone(family, dtype)
    if "models" in wanted:
        import torch._dynamo.backends.debugging  # torch's compiler: each process would import it
        import torch._inductor.compile_fx
    if "benchmark" in wanted:
        import benchmarks.ranks.model
        import benchmarks.ranks.show  # noqa: F401
    lasting = together([name for name in wanted if name not in ("broken", "benchmark")])
    waiting = CHECKS["broken"] if "broken" in wanted else []  # together: they do nothing but wait
    two = CHECKS["benchmark"] if "benchmark" in wanted else []
    sys.exit(sum(ranks(*each, 240) for each in ((4, [lasting]), (4, waiting), (2, two))))
