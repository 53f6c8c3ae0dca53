"""Rows that are saved as they are found: passes of many launches in interleaved rounds, by the adapter's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from isogemm.backends import open_device
from isogemm.backends.webgpu.adapter import ReadyLaunch
from isogemm.backends.webgpu.admission import AdapterAdmissions
from isogemm.backends.webgpu.kernels import code_of, kernel_of
from isogemm.backends.webgpu.trusted import TRUSTED
from isogemm.lab import environment, write_json
from isogemm.operands.device_array import DeviceId

from ..common import results_path, words_of

PASS = 0.006  # seconds of one pass
ROUNDS = 5
WARM = 2.0  # seconds of work before rounds at most, since clocks fall where there was none
HELD = 2  # runs of that work before each pass
SLOW = 0.1  # seconds of one product, from which on a GPU one pass is enough


@dataclass
class Timed:
    """One candidate of one product.

    Attributes
    ----------
    seconds : list of float
        Of one product, a round each.
    verdict : str
        Of admission, empty where the kernel was admitted.
    checked : bool
        With wgpu's checks of indices and loops.
    in_turn : float
        Seconds of one product where each waits for the one before.
    clock : float
        The device's, as a share of its best in this run: the lower one of before and after the rounds.
    """

    product: str
    kernel: str
    m: int
    n: int
    k: int
    nbytes: int = 0
    checked: bool = True
    fused: bool = True
    verdict: str = ""
    differing: int | None = None
    error: str = ""
    seconds: list[float] = field(default_factory=list)
    in_turn: float | None = None
    clock: float | None = None

    @property
    def best(self) -> float:
        return median(self.seconds) if self.seconds else float("inf")

    def row(self) -> dict[str, Any]:
        """Plain data, with GB/s of the weights and GFLOP/s."""
        found = asdict(self)
        if self.seconds:
            found |= {"median": self.best, "gb_per_second": self.nbytes / self.best / 1e9,
                      "gflops": 2 * self.m * self.n * self.k / self.best / 1e9}  # fmt: skip
        return found


Make = Callable[[int], list[ReadyLaunch]]  # the launches of call i


class Bench:
    """Rows that are saved as they are found, within a number of seconds."""

    def __init__(self, seconds: float, path: Path | None, *, checked: bool = False) -> None:
        self.checked, self.probe, self.fastest = checked, None, 0.0
        self.device: Any = open_device(DeviceId("webgpu"))
        self.adapter = self.device.adapter
        self.ends, self.rows, self.facts = time.monotonic() + seconds, [], {}
        self.path = path or results_path("webgpu", self.adapter.name)
        self.stamp = environment()
        self.admissions = AdapterAdmissions(self.adapter)

    def say(self, text: str) -> None:
        print(f"{self.ends - time.monotonic():6.0f} s left  {text}", flush=True)

    def late(self) -> bool:
        return time.monotonic() > self.ends

    def save(self) -> None:
        write_json(
            self.path, [row.row() for row in self.rows], environment=self.stamp, schema="isogemm.webgpu.v2",
            adapter=self.adapter.name, subgroup=self.adapter.subgroup, timestamps=self.adapter.timestamps,
            limits=asdict(self.adapter.limits), **self.facts,
        )  # fmt: skip

    def tried(self, what: str, call: Callable[[], Any]) -> Any:
        """A step that may fail: then the error is kept, and None returned."""
        try:
            return call()
        except Exception as error:  # one run on a borrowed machine: a failure must not end it
            self.facts.setdefault("errors", {})[what] = words_of(error)
            self.say(f"{what}: {words_of(error)}")
            return None

    def code(self, row: Timed, types: tuple[str, str], across: bool) -> str:
        """An admitted code; where none is, the plain one, with the verdict in the row."""
        for fused in (True,) if kernel_of(row.kernel).words else (True, False):
            code = code_of(row.kernel, types, across=across, subgroup=self.adapter.subgroup, fused=fused)
            code = code.removeprefix(TRUSTED) if self.checked else code
            row.checked = not code.startswith(TRUSTED)
            row.verdict, row.fused = self.admissions.verdict(row.kernel, types, code), fused
            if not row.verdict:
                break
        return code

    def warm(self) -> float:
        """Work until the device's clock is where it was at its best, as the multiply-adds of `ceilings` tell.

        The share of the best clock that was reached.
        """
        if self.probe is None:
            return float("nan")
        ends, share = time.monotonic() + (0 if self.adapter.software else WARM), 0.0
        while share < 0.97:
            spent = self.adapter.seconds(self.probe)
            self.fastest = min(self.fastest or spent, spent)
            share = self.fastest / spent
            if time.monotonic() > ends:
                break
        return share

    def seconds(self, launches: Sequence[ReadyLaunch]) -> float:
        """Of launches that follow work without a pause: after one, clocks are lower."""
        return self.adapter.seconds(launches, (self.probe or []) * (1 if self.adapter.software else HELD))

    def timed(self, candidates: Sequence[tuple[Timed, Make]], sets: int, rounds: int = ROUNDS) -> None:
        """Rounds of all candidates in turn; `sets` calls have different operands."""
        ready: list[tuple[Timed, list[ReadyLaunch], int]] = []
        for row, make in candidates:
            self.rows.append(row)
            try:
                one = make(0)
                spent = min(self.seconds(one) for _ in range(2))
                if spent > SLOW and not self.adapter.software:
                    row.seconds = [spent]
                    continue
                calls = int(min(max(PASS / max(spent, 1e-7), sets), 400))
                launches = [x for i in range(calls) for x in make(i)]
                if len(launches) != calls * len(one):
                    raise ValueError("calls of one product differ in their launches")
                row.in_turn = self.seconds(one * calls) / calls if sets == 1 or spent > 1e-4 else None
                ready.append((row, launches, calls))
            except Exception as error:
                row.error = words_of(error)
                self.say(f"{row.product} {row.kernel}: {row.error}")
        clock = self.warm()
        for first in range(rounds):
            for row, launches, calls in (*ready[first % len(ready) :], *ready[: first % len(ready)]) if ready else ():
                row.seconds.append(self.seconds(launches) / calls)
        clock = min(clock, self.warm())
        for row, _, _ in ready:
            row.clock = clock


def bound_launch(adapter: Any, code: str, buffers: dict[int, Any], grid: tuple[int, int]) -> ReadyLaunch:
    """A launch of a kernel that is none of ours."""
    pipeline = adapter.pipeline(code)
    entries = [{"binding": at, "resource": {"buffer": getattr(buffer, "handle", buffer)}} for at, buffer in
               buffers.items()]  # fmt: skip
    group = adapter._device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    return ReadyLaunch(pipeline, group, grid)


def told(bench: Bench, product: str, rows: Sequence[Timed], most: int = 6) -> None:
    copy = bench.facts.get("copy_gb_per_second") or float("nan")
    for row in sorted(rows, key=lambda x: x.best)[:most]:
        bench.say(
            f"{product:30} {row.kernel}{'' if row.checked else ' unchecked'}: {row.best * 1e6:.1f} us, "
            f"{row.nbytes / row.best / 1e9:.0f} GB/s = {row.nbytes / row.best / 1e9 / copy:.2f} of a copy, "
            f"{2 * row.m * row.n * row.k / row.best / 1e12:.2f} TFLOP/s, bits {row.differing}"
            f"{' REFUSED' if row.verdict else ''}{'' if row.fused else ' by integers'}"
        )
