"""What a GPU's performance counters say of kernels, read by NVIDIA's ncu: pipes, caches, memory and stalls.

ncu runs a program of its own and replays each of its kernels some tens of times. Many machines have no ncu, and many
drivers let nobody but an administrator read counters: then there is an error that says so, and no number.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ..errors import DeviceError

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {
    "tensor pipe %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "FMA pipe %": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "L1 %": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "HBM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps active %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "short scoreboard": _STALL.format("short_scoreboard"),
    "math pipe": _STALL.format("math_pipe_throttle"),
    "barrier": _STALL.format("barrier"),
}
"""Names for people, and ncu's: percentages of what is possible, and stalled warps for each instruction issued."""

TIMEOUT = 300.0


def read_counters(command: Sequence[str], ranges: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean counters of the kernels that a program launches within some NVTX ranges, after `cudaProfilerStart`.

    They are `METRICS` by name, for each range that has kernels; what this GPU does not count is missing. Raises
    DeviceError: no ncu, or it may not or could not read counters.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise DeviceError(
            "counters", limit="ncu of NVIDIA's Nsight Compute on the PATH", value="none", nearest="install it"
        )
    options = [
        "--csv",
        "--page",
        "raw",
        "--nvtx",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(METRICS.values()),
    ]
    try:
        answer = subprocess.run(
            [tool, *options, *command], capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError("counters", limit="a run of ncu", value=str(error)[:200], nearest="a smaller case") from error
    said = [line for line in (answer.stdout + answer.stderr).splitlines() if line.startswith("==ERROR==")]
    if said:
        refused = any("ERR_NVGPUCTRPERM" in line for line in said)
        near = "an administrator, or a driver that lets users profile" if refused else "the message of ncu"
        raise DeviceError("counters", limit="a driver that lets ncu read them", value=said[0][:200], nearest=near)
    return _by_range(answer.stdout, ranges)


def _by_range(text: str, ranges: Sequence[str]) -> dict[str, dict[str, float]]:
    """Means over the kernels of each range."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launched: dict[str, list[Mapping[str, str]]] = {}
    for row in csv.DictReader(lines):
        where = next((name for name in ranges if any(name in (cell or "") for cell in row.values())), None)
        if row["ID"] and where is not None:  # the line without a number has the units
            launched.setdefault(where, []).append(row)
    return {where: _means(rows) for where, rows in launched.items()}


def _means(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    found = {}
    for name, metric in METRICS.items():
        values = [_number(row.get(metric, "")) for row in rows]
        known = [value for value in values if value is not None]
        if known:
            found[name] = sum(known) / len(known)
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
