"""Admit everything that a shipped tuning table names anew, on this GPU, and write its fingerprints, stamp and dates.

    python -m tools.readmit                      # src/isogemm/planner/tables/h200.json, in place
    python -m tools.readmit TABLE --out FILE
    python -m tools.readmit --time 300           # and time its rows anew, for so many seconds

Without ``--time`` rows and microseconds stay as they are. What is refused is said and left out, and the status is
then 1. A run that was interrupted goes on from the verdicts that were recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isogemm.base.disk import write_whole
from isogemm.planner import tables
from isogemm.planner.tables import dump, load
from isogemm.planner.tuning import pose_key, readmit, tune

SHIPPED = Path(tables.__file__).parent / "tables" / "h200.json"
SECONDS = 480.0  # for compiling and trying side by side; what is left is tried one by one


def main(words: list[str] | None = None, opened: Callable[[int], Any] | None = None) -> int:
    """The command; `opened` gives (chooser, bench, prepare) of a device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--out", type=Path, help="another file to write")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--time", type=float, default=0.0, help="seconds after which no further row is timed anew")
    given = parser.parse_args(words)
    chooser, bench, prepare = (opened or on_gpu)(given.device)
    table = load(given.table)
    own = chooser.admissions.stamp.get("device")
    if table.stamp.get("device") != own:
        print(f"{given.table.name} is a table of {table.stamp.get('device')}, and this is {own}", file=sys.stderr)
        return 2
    made, refused = readmit(table, chooser, bench, prepare=prepare)
    if given.time > 0:
        products = [pose_key(row.key, 2) for row in made.rows]
        sweep = {row.key: sorted(row.us) for row in made.rows}
        made, left = tune(
            products, sweep, chooser, bench, name=made.name, table=made, prepare=prepare, budget=given.time, again=True
        )
        print(f"{len(products) - left} of {len(products)} rows timed anew")
    write_whole(given.out or given.table, dump(made))
    kernels = sum(len(entry.configs) for entry in made.admitted)
    print(f"{kernels} kernels and {len(made.library)} ranges of a library admitted, {len(refused)} refused")
    for line in refused:
        print(f"refused: {line}")
    return 1 if refused else 0


def on_gpu(device: int) -> tuple[Any, Any, Any]:
    """The chooser of a GPU, what compares kernels there, and what compiles ahead."""
    from isogemm.backends import open_device
    from isogemm.lab.gpu.bench import GpuBench, prepare_in_processes
    from isogemm.operands.device_array import DeviceId

    chooser = open_device(DeviceId("cuda", device)).chooser
    return chooser, GpuBench(device), lambda jobs: prepare_in_processes(device, jobs, seconds=SECONDS)


if __name__ == "__main__":
    sys.exit(main())
