"""A GPU's stand-in for the benchmarks of products on one."""

from __future__ import annotations

from benchmarks.gpu.engine import HostEngine

from isogemm.lab import SubmitClock, SyncClock

CEILINGS = {"bytes_per_second": 4e12, "bfloat16": 8e14, "float16": 8e14, "float32": 5e13, "tf32x3": 1.3e14}


class StandIn(HostEngine):
    """Clocks as a GPU has them, ceilings that nobody measured, and the lengths of the graphs that were captured."""

    def __init__(self):
        super().__init__()
        self.submit, self.wall = SubmitClock(self.synchronize), SyncClock(self.synchronize)
        self.captured = []

    def capture(self, calls):
        self.captured.append(len(calls))
        return super().capture(calls)

    def ceilings(self):
        return CEILINGS

    def facts(self):
        return {"name": "Stand-in 9000"}
