"""``isogemm info``: what a report of a problem needs, and what a new user wants to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

KERNELS = "*.kernel"


def info_command(as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """Show versions, the CPU and its vectors, threads, what is compiled and where it is kept, and the GPU."""
    found = facts()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:<{width}}  {value}")


def facts() -> dict[str, Any]:
    """What there is to know, by name, in plain values."""
    from .. import lab
    from ..api.plan import plan

    stamp = lab.environment()
    cpu = stamp["cpu"]
    return {
        "isogemm": stamp["packages"].pop("isogemm"),
        "packages": ", ".join(f"{name} {version}" for name, version in stamp["packages"].items()),
        "system": stamp["system"],
        "CPU": f"{cpu['model']}, {cpu['usable']} usable of {cpu['logical']}",
        "compiled for": plan(1, 64, 64).target,
        "threads": stamp["threads"],
        "thresholds": plan(1, 64, 64).thresholds,
        "settings": ", ".join(f"{name}={value}" for name, value in stamp["variables"].items()) or "none",
        "kernels": _kernels(),
        "GPU": _gpus(),
        "GPU kernels": _admissions(),
    }


def _kernels() -> str:
    from ..base.jit import cache_directory

    folder = cache_directory()
    if folder is None:
        return "not kept: this user has no cache directory"
    files = list(folder.glob(KERNELS)) if folder.is_dir() else []
    if not files:
        return f"none compiled yet in {folder} (isogemm warm does it ahead)"
    others = [other for other in folder.parent.glob("kernels-*") if other != folder]
    old = f"; {len(others)} older folders beside it, {_size(others)}, may be removed" if others else ""
    return f"{len(files)} compiled, {_size([folder])}, in {folder}{old}"


def _size(folders: list[Path]) -> str:
    total = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    return f"{total / 1e6:.1f} MB"


def _gpus() -> str:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return "not looked for: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"none that torch {torch.__version__} can use"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def _admissions() -> str:
    from ..lab.admissions import folder, read

    found = list(read(folder()))
    refused = sum(record.state == "refused" for record in found)
    return (
        f"{len(found) - refused} admitted by their bits, {refused} refused (isogemm admissions)"
        if found
        else "none tried"
    )
