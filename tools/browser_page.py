"""Write the page that runs the WebGPU kernels in a visitor's browser: ``python -m tools.browser_page``.

The page, docs/browser/webgpu.html, holds the kernels as they are assembled for float16 operands, without subgroups,
which not every browser has. Products of float16 are exact in float32, so the device's own ``fma`` serves everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

from isogemm.backends.webgpu.kernels import KERNELS, code_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "browser" / "webgpu.html"
ACROSS = {"gemv_transposed"}  # wants its weight stored [k, n]


def page() -> str:
    """The page's text."""
    template = (ROOT / "tools" / "browser.html").read_text(encoding="utf-8")
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
    return template.replace("KERNELS", json.dumps(kernels).replace("</", "<\\/"))


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {PAGE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
