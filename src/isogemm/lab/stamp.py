"""The environment stamp: everything about a machine that a timing depends on."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .rotation import cache_sizes

PACKAGES = ("isogemm", "numpy", "ml_dtypes", "numba", "llvmlite", "threadpoolctl", "torch")
VARIABLES = (
    *("ISOGEMM_NUM_THREADS", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "MKL_NUM_THREADS"),
    *("OPENBLAS_L2_SIZE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"),
)
"""Settings that reach a library's choice of code, or its speed."""


def environment() -> dict[str, Any]:
    """Describe the machine, its libraries and this program, as JSON-ready values.

    Returns
    -------
    dict
        ``cpu`` (model, LLVM's name of the core, physical, logical and usable CPUs, instruction-set features,
        cache bytes), ``threads`` (isogemm's count), ``pools`` (BLAS and OpenMP libraries loaded now, with
        version, architecture and threads), ``packages``, ``variables`` (those set that change code or speed),
        ``system``, ``load`` (processes ready to run, 1-minute mean), ``git`` (commit and dirty flag, or None
        outside a checkout of this package), ``date`` (UTC), ``command``.

    Notes
    -----
    Libraries loaded later are missing from ``pools``: take the stamp after the peers are imported. File paths
    are left out, so that the stamp can be published.
    """
    from ..base.threads import get_num_threads

    return {
        "cpu": _cpu(),
        "threads": get_num_threads(),
        "pools": _pools(),
        "packages": _packages(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "git": _git(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
    }


def command_line() -> str:
    """The command that started this process, without the interpreter's and the script's folders."""
    words = list(sys.orig_argv)
    if len(words) > 1 and os.sep in words[1] and Path(words[1]).parent == Path(words[0]).parent:
        words = words[1:]  # a console script, started by its interpreter
    if words:
        words[0] = "python" if Path(words[0]).name.startswith("python") else Path(words[0]).name
    return shlex.join(words)


@functools.cache
def _cpu() -> dict[str, Any]:
    import psutil
    from llvmlite import binding

    return {
        "model": cpu_model(),
        "core": binding.get_host_cpu_name(),
        "physical": psutil.cpu_count(logical=False),
        "logical": psutil.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": sorted(name for name, present in binding.get_host_cpu_features().items() if present),
        "caches": cache_sizes(),
    }


def cpu_model() -> str:
    """The processor's name, as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        answer = _run("sysctl", "-n", "machdep.cpu.brand_string")
        if answer:
            return answer
    return platform.processor() or platform.machine()


def _pools() -> list[dict[str, Any]]:
    from threadpoolctl import threadpool_info

    wanted = ("user_api", "internal_api", "version", "architecture", "threading_layer", "num_threads")
    return [
        {"library": Path(pool["filepath"]).name} | {key: pool[key] for key in wanted if key in pool}
        for pool in threadpool_info()
    ]


def code_of_libraries() -> dict[str, str]:
    """What computes products on this CPU, by library: the BLAS that each has loaded, and the core we compile for.

    A BLAS that is linked into its library, as torch's MKL, cannot be seen from outside and is missing.
    """
    from llvmlite import binding
    from threadpoolctl import threadpool_info

    found = {"isogemm": f"isogemm for {binding.get_host_cpu_name()}"}
    for pool in threadpool_info():
        if pool["user_api"] == "blas":
            library = "torch" if "torch" in pool["filepath"] else "numpy"
            words = (str(pool[key]) for key in ("internal_api", "version", "architecture") if pool.get(key))
            found[library] = " ".join(words)
    return found


def _packages() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git() -> dict[str, Any] | None:
    """State of the checkout that this package was imported from: an installed copy inside someone's own
    repository is not a checkout of it."""
    folder = str(Path(__file__).parent)
    if not _run("git", "-C", folder, "ls-files", "--error-unmatch", Path(__file__).name):
        return None
    commit = _run("git", "-C", folder, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_run("git", "-C", folder, "status", "--porcelain"))} if commit else None


def _run(*words: str) -> str:
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
