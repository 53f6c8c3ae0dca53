"""The measuring core: interleaved timing, verdicts that can say AMBIGUOUS, ceilings, and rows that can be repeated.

Examples
--------
>>> from isogemm.lab import Candidate, interleave, verdict
>>> import numpy as np
>>> a = np.ones((64, 64), np.float32)
>>> timings = interleave([Candidate("plain", lambda i: a @ a), Candidate("twice", lambda i: (a @ a, a @ a))])
>>> print(verdict(timings["plain"], timings["twice"]))  # doctest: +SKIP
1.98x twice [1.95, 2.01] FASTER
"""

from ..base.collector import uncollected
from .ceilings import Ceilings, StreamingRead, Work, fp32_peak, measure_ceilings, streaming_read
from .clock import WALL, Clock, CpuClock, QuietClock, Run, SubmitClock, SyncClock, WallClock
from .limits import limit_threads
from .rotation import cache_sizes, last_level_cache, rotate
from .rows import SCHEMA, read_json, row, write_json
from .stamp import command_line, environment
from .timing import Candidate, Progress, Timing, interleave
from .verdicts import Bar, Verdict, Word, fastest, relative_speed, verdict

__all__ = [
    "SCHEMA",
    "WALL",
    "Bar",
    "Candidate",
    "Ceilings",
    "Clock",
    "CpuClock",
    "Progress",
    "QuietClock",
    "Run",
    "StreamingRead",
    "SubmitClock",
    "SyncClock",
    "Timing",
    "Verdict",
    "WallClock",
    "Word",
    "Work",
    "cache_sizes",
    "command_line",
    "environment",
    "fastest",
    "fp32_peak",
    "interleave",
    "last_level_cache",
    "limit_threads",
    "measure_ceilings",
    "read_json",
    "relative_speed",
    "rotate",
    "row",
    "streaming_read",
    "uncollected",
    "verdict",
    "write_json",
]
