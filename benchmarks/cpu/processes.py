"""Cases that start an interpreter: time to import, and to the first result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from isogemm.lab import Candidate, Run

__all__ = ["ReportedClock", "process_candidates"]

TIMED = """
import numpy as np, ml_dtypes
ones = lambda *shape, dtype=np.float32: np.ones(shape, dtype)
import time; start = time.perf_counter()
{body}
print(time.perf_counter() - start)
"""
IMPORT = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
FIRST_CALL = TIMED.format(body="import isogemm; isogemm.matmul(ones(64, 64), ones(64, 64))")
# A call of each kind, so that every kernel that the suites of this benchmark use is compiled.
ALL_CALLS = TIMED.format(
    body="""
import isogemm
for a in (ones(600, 600), ones(600, 600).T):
    for b in (ones(600, 600), ones(600, 600).T):
        isogemm.matmul(a, b)
for dtype in (np.float32, ml_dtypes.bfloat16):
    for w in (ones(512, 512, dtype=dtype), isogemm.pack(ones(512, 512, dtype=dtype))):
        for m in (1, 2, 4, 8, 16, 64, 256):
            isogemm.linear(ones(m, 512, dtype=dtype), w)
isogemm.matmul(ones(4, 64, 64), ones(4, 64, 64))
isogemm.matmul(ones(2, 512, 128), ones(2, 128, 512))
"""
)


class ReportedClock:
    """Adds up the seconds that calls return: a child process times itself, without the interpreter's start."""

    def elapsed(self, run: Run, first: int, calls: int) -> float:
        """See `isogemm.lab.Clock`."""
        return sum(float(str(run(i))) for i in range(first, first + calls))

    def pause(self, seconds: float) -> None:
        """Starting a process is rest enough."""


def process_candidates(label: str) -> list[Candidate]:
    """Ours first; ``import numpy`` stands beside ``import isogemm``, which includes it, for scale."""
    if label == "isogemm":
        return [_import("isogemm", "isogemm"), _import("import numpy", "numpy")]
    if label == "first-call":
        return [Candidate("isogemm", lambda i: _python(FIRST_CALL))]
    code = ALL_CALLS if label == "compiling-all" else FIRST_CALL
    return [Candidate("isogemm", lambda i: _compiling(code))]


def _import(name: str, module: str) -> Candidate:
    return Candidate(name, lambda i: _python(IMPORT.format(module=module)))


def _compiling(code: str) -> str:
    """Run with an empty cache of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        return _python(code, XDG_CACHE_HOME=folder, NUMBA_CACHE_DIR=folder)


def _python(code: str, **variables: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | variables
    )
    if answer.returncode:
        raise RuntimeError((answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1])
    return answer.stdout.strip()
