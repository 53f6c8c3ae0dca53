"""A clock of device time: calls captured into a CUDA graph, and replayed between two events."""

from __future__ import annotations

import time
from typing import Any

from ...base.collector import uncollected
from ..clock import Run

MOST_NODES = 128
KEPT_SHARE = 1 / 8


class GraphClock:
    """Seconds of device time of calls that enqueue on torch's current stream; see `isogemm.lab.Clock`.

    Graphs leave out the host. They share one pool of memory for what their calls allocate, since nobody reads it. A
    ``run`` may have an attribute ``period``, the number of operand sets that it rotates through: a graph takes whole
    turns, or begins where the last part of a turn ended, so that no weight is found in a cache by chance.
    """

    def __init__(self, device: int = 0) -> None:
        import torch

        self._cuda = torch.cuda
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[Run, int, int], Any] = {}
        self._called: set[tuple[Run, int]] = set()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """Seconds of device time; long runs are whole replays of a shorter graph, scaled to `calls`."""
        period = int(getattr(run, "period", 1))
        start, unit = first % period, calls
        if calls >= period:
            start, unit = 0, max(period, min(calls, MOST_NODES) // period * period)
        replays = calls // unit
        graph = self._graph(run, start, unit)
        begin, end = self._events
        with self._cuda.device(self.device), self._cuda.stream(self._stream):
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) * 1e-3
        return seconds * calls / (replays * unit)

    def pause(self, seconds: float) -> None:
        """Sleep; a GPU needs no rest between kernels, so callers ask for none."""
        time.sleep(seconds)

    def forget(self) -> None:
        """Drop all graphs, and with them what their calls refer to."""
        self._cuda.synchronize(self.device)
        self._graphs.clear()
        self._called.clear()
        self._pool = self._cuda.graph_pool_handle()  # the last graph took its pool along

    def _graph(self, run: Run, first: int, calls: int) -> Any:
        """A graph that has been replayed: its first replay uploads it, a microsecond for each call."""
        found = self._graphs.get((run, first, calls))
        if found is not None:
            return found
        graph = self._cuda.CUDAGraph()
        with self._cuda.device(self.device), self._cuda.stream(self._stream):
            if (run, first) not in self._called:
                run(first)  # whatever a first call does must not be captured
                self._called.add((run, first))
            self._cuda.synchronize(self.device)
            self._give_back()
            with uncollected():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    for i in range(first, first + calls):
                        run(i)
                finally:
                    graph.capture_end()
            graph.replay()
        self._graphs[run, first, calls] = graph
        return graph

    def _give_back(self) -> None:
        """Return what calls outside of graphs have left in the allocator, where it is a large share of the memory."""
        cuda, device = self._cuda, self.device
        kept = cuda.memory_reserved(device) - cuda.memory_allocated(device)
        if kept > KEPT_SHARE * cuda.get_device_properties(device).total_memory:
            cuda.empty_cache()
