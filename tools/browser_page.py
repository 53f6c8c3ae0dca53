"""Write the page that runs the WebGPU kernels in a visitor's browser: ``python -m tools.browser_page FILE``.

The documentation's site has it as browser/webgpu.html. It holds the kernels as they are assembled for float16 operands,
without subgroups, which not every browser has. Products of float16 are exact in float32, so the device's own ``fma``
serves everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from isogemm.backends.webgpu.kernels import KERNELS, code_of
from isogemm.base.disk import write_whole

TEMPLATE = Path(__file__).with_name("browser.html")
ACROSS = {"gemv_transposed"}  # wants its weight stored [k, n]


def page() -> str:
    """The page's text."""
    kernels = {
        name: {
            "order": kernel.order,
            "rows": kernel.rows,
            "columns": kernel.columns,
            "across": name in ACROSS,
            "code": code_of(name, ("float16", "float16"), across=name in ACROSS, subgroup=0, fused=True),
        }
        for name, kernel in KERNELS.items()
        if kernel.order != "integers"
    }
    return TEMPLATE.read_text(encoding="utf-8").replace("KERNELS", json.dumps(kernels).replace("</", "<\\/"))


def write(path: Path) -> None:
    """Write the page there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page())


if __name__ == "__main__":
    typer.run(write)
