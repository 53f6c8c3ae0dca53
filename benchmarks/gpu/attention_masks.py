"""Attention behind masks, device time in CUDA graphs: ``python -m benchmarks.gpu.attention_masks out.json``.

Run it on two versions in turns to compare them: each file says which one it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isogemm.lab import Candidate, environment, interleave, write_json
from isogemm.lab.gpu.clock import GraphClock

HEADS, SHARED, WIDTH = 16, 8, 128
PREFILL = [(1, 4096), (4, 2048), (8, 300)]  # batch, tokens
DECODE = [(1, 1024), (8, 1024), (8, 8192), (64, 1024)]  # batch, keys
WINDOW = 4


def main(out: Path, blocks: int = 9) -> None:
    """Time isogemm's attention, and torch's, with a causal rule, a mask of padding, and a mask of a sliding window."""
    import torch

    clock, rows = GraphClock(), []
    for name, calls in cases(torch):
        for call in calls.values():
            call(0)
        found = interleave(
            [Candidate(who, call) for who, call in calls.items()],
            blocks=blocks,
            block_seconds=4e-3,
            pause=0,
            clock=clock,
        )
        microseconds = {who: [round(s * 1e6, 3) for s in timing.samples] for who, timing in found.items()}
        rows.append({"case": name, "microseconds": microseconds})
        print(name, {who: f"{timing.median * 1e6:.2f}" for who, timing in found.items()}, flush=True)
        clock.forget()
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    print(write_json(out, rows, environment=environment(), benchmark="attention behind masks", **facts))


def cases(torch: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, ways to compute it)."""
    import isogemm.torch as ours

    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.manual_seed(0)
    for b, t in PREFILL:
        yield f"causal {b}x{t}", calls(ours, sdpa, operands(torch, b, t, t), causal=True)
        for what, window in (("padded", 0), ("window", t // WINDOW)):
            yield f"{what} {b}x{t}", calls(ours, sdpa, operands(torch, b, t, t), shown(torch, b, t, t, window))
    for b, t in DECODE:
        yield f"decode {b}x{t}", calls(ours, sdpa, operands(torch, b, 1, t))
        yield f"decode padded {b}x{t}", calls(ours, sdpa, operands(torch, b, 1, t), shown(torch, b, 1, t))


def calls(ours: Any, sdpa: Any, x: list[Any], mask: Any = None, causal: bool = False) -> dict[str, Any]:
    """isogemm's call and torch's, of the same arguments."""
    given = {"is_causal": causal, "enable_gqa": True}
    return {
        "isogemm": lambda i: ours.scaled_dot_product_attention(*x, mask, **given),
        "torch": lambda i: sdpa(*x, mask, **given),
    }


def operands(torch: Any, b: int, tq: int, tk: int) -> list[Any]:
    """q, k and v as models lay them out: heads inside tokens."""
    made = ((HEADS, tq), (SHARED, tk), (SHARED, tk))
    return [torch.randn(b, t, h, WIDTH, device="cuda").bfloat16().transpose(1, 2) for h, t in made]


def shown(torch: Any, b: int, tq: int, tk: int, window: int = 0) -> Any:
    """A causal mask behind padding of 0, 37, 74 ... tokens; with a window, without padding."""
    query, key = torch.arange(tq, device="cuda").view(tq, 1) + tk - tq, torch.arange(tk, device="cuda")
    if window:
        return ((key <= query) & (key > query - window)).expand(b, 1, tq, tk).contiguous()
    first = torch.arange(b, device="cuda").view(b, 1, 1, 1) * 37 % (tk // 2)
    return (key <= query) & (key >= first)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
