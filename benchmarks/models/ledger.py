"""Cases of one run: each within its part's time, its row written as it ends, its error kept as a row's."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from isogemm.lab import Candidate, SyncClock, WallClock, environment, interleave, row, verdict, write_json

from ..common import words_of

__all__ = ["Case", "Ledger", "Sizes", "synchronize", "timed"]

Case = tuple[str, Callable[[], Mapping[str, Any]]]
"""A name, and what makes the facts of its row."""


class OutOfTime(BaseException):
    """The time of a part is spent; no library's handler of errors takes it for one of its own."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where and how large: `tiny` are sizes that a CPU takes seconds for."""

    device: str = "cuda"
    tiny: bool = False
    seed: int = 0
    rounds: int = 7
    block_seconds: float = 0.02


@dataclass
class Ledger:
    """Rows and the file that holds them, replaced whole after every case."""

    path: Path
    sizes: Sizes
    facts: Mapping[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._stamp = environment()

    def part(self, name: str, cases: Iterator[Case], seconds: float) -> None:
        """Run the cases of a part, until its seconds are over."""
        end = time.monotonic() + seconds
        try:
            with _limited(seconds):
                for title, make in cases:
                    self._case(name, title, make)
        except OutOfTime:
            self._keep({"part": name, "name": "the rest", "error": f"the part's {seconds:g} s were over"})
        except Exception as error:
            self._keep({"part": name, "name": "cases", "error": words_of(error)})
        self.say(f"{name}: {seconds - (end - time.monotonic()):.0f} s")
        _free(self.sizes.device)

    def say(self, words: str) -> None:
        """A line of progress."""
        typer.echo(f"{time.monotonic() - self.begin:5.0f} s {words}")

    def _case(self, part: str, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
        begin, found = time.monotonic(), {"part": part, "name": name, "error": None}
        try:
            found |= make()
        except OutOfTime:
            self._keep(found | {"error": "the part's time was over", "seconds": time.monotonic() - begin})
            raise
        except Exception as error:
            found["error"] = words_of(error)
        self._keep(found | {"seconds": round(time.monotonic() - begin, 3)})

    def _keep(self, found: dict[str, Any]) -> None:
        self.rows.append(found)
        shown = {k: v for k, v in found.items() if k not in ("part", "name", "timings", "verdicts", "params", "counts")}
        words = " ".join(f"{k}={v}" for k, v in shown.items() if v is not None and not isinstance(v, list | dict))
        ratios = " ".join(f"{v['ours']}/{v['peer']} {v['ratio']:.3f}" for v in found.get("verdicts") or ())
        self.say(f"{found['part']}: {found['name']}: {words[:300]} {ratios}")
        write_json(self.path, self.rows, environment=self._stamp, benchmark="models", **self.facts)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def over(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _free(device: str) -> None:
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def synchronize(sizes: Sizes) -> None:
    """Wait for the device."""
    import torch

    if sizes.device == "cuda":
        torch.cuda.synchronize()


def timed(sizes: Sizes, calls: Mapping[str, Callable[[], Any]], peer: str) -> dict[str, Any]:
    """Interleaved times until the device is done, and the speed of the others relative to `peer`."""
    clock = SyncClock(lambda: synchronize(sizes)) if sizes.device == "cuda" else WallClock()
    candidates = [Candidate(name, lambda i, call=call: call()) for name, call in calls.items()]
    timings = interleave(
        candidates, blocks=sizes.rounds, block_seconds=1e-3 if sizes.tiny else sizes.block_seconds, pause=0, clock=clock
    )
    verdicts = [verdict(timings[name], timings[peer]) for name in calls if name != peer]
    found = row("", command="", timings=timings, verdicts=verdicts)
    return {key: found[key] for key in ("timings", "verdicts")}
