"""Golden vectors of products with quantized weights, made on an NVIDIA GPU.

    python tools/golden_int32.py --out tests/golden

Wants torch. Draws activations and blocks, multiplies them by every kind of kernel under ``int32/chain`` and, with
float32 activations, under ``fma/chain``, checks that all kernels agree bit for bit, and writes ``int32.npz`` and
``int32.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from golden_gpu import Vectors

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.quant.draws import KINDS, WEIGHTS, blocks, values

Array = Any
M, N = 9, 21
K = {32: 160, 256: 768}


def activations(kind: str, k: int, seed: int) -> Array:
    """float32 [M, k], with rows of zeros, an infinity, a NaN, scales beyond float16, and ties."""
    x = values(kind, M, k, seed)
    x[4, :256] = 0
    x[5, k - 1] = np.inf
    x[6, 3] = np.nan
    with np.errstate(over="ignore"):
        x[7] *= np.float32(2.0**20)
    x[8] = (np.arange(k) * 7 % 253 - 126) / 2  # codes are these numbers: every second one is a tie
    x[8, ::32] = 127
    return x


def kernels(fmt: Any) -> dict[str, Any]:
    """Configurations by name: warps alone and in turns, one and two tiles of rows of x, and tiles for many rows."""
    from isogemm.backends.cuda.quant.integers.few import FewCodes
    from isogemm.backends.cuda.quant.integers.many import ManyCodes

    span = 128 if fmt.block == 32 else 256
    return {
        "few alone": FewCodes(2, 1, 2, 2),
        "few in turns": FewCodes(1, 3, 1, 2),
        "few, x staged": FewCodes(2, 1, 3, 2, 256, "staged"),
        "few wide, in turns": FewCodes(2, 2, 2, 2, span),
        "many 128x32": ManyCodes(1, 4, 8, 1, 2),
        "many 64x64": ManyCodes(2, 4, 2, 2, 2),
    }


def run(x: Array, packed: Any, chosen: Any, floats: bool) -> Array:
    """Result bits [M, N]."""
    import torch

    from isogemm.backends.cuda.quant import floats as in_float32
    from isogemm.backends.cuda.quant.integers import kernel as in_integers

    y = torch.full((len(x), packed.n), float("nan"), device="cuda")
    given = torch.from_numpy(x).cuda()
    (in_float32 if floats else in_integers).KERNEL.run(given, packed, y, None, chosen)
    return y.view(torch.int32).cpu().numpy().view(np.uint32)


def record(folder: Path, seed: int) -> int:
    """Draw, multiply, compare the kernels, write both files."""
    import torch

    from isogemm.backends.cuda.quant.layout import Packed, layout, pack

    found = Vectors()
    arrays, used = found.arrays, found.instructions
    for block, k in K.items():
        for kind in KINDS:
            arrays[f"{kind}-{block}.x"] = activations(kind, k, seed)
    for fmt in WEIGHTS:
        k = K[fmt.block]
        rows = arrays[f"{fmt.name}.w"] = blocks(fmt, N, k // fmt.block, seed)
        data = torch.from_numpy(pack(rows, fmt)).cuda()
        packed = Packed(data, layout(fmt), N, k)
        for kind in KINDS:
            name, x = f"{fmt.name}-{kind}", arrays[f"{kind}-{fmt.block}.x"]
            for tile, chosen in kernels(fmt).items():
                used[tile]["int32/chain"] += 1
                found.add(name, tile, run(x, packed, chosen, False), "int32")
            for tile in ("floats, few", "floats, many"):
                used[tile]["fma/chain"] += 1
                if tile == "floats, few":
                    bits = np.concatenate([run(part, packed, None, True) for part in (x[:8], x[8:])])
                else:
                    bits = run(np.concatenate([x] * 4), packed, None, True)[-M:]
                found.add(name, tile, bits, "fma")
    return found.save(folder, "int32", seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/golden"))
    parser.add_argument("--seed", type=int, default=20261121)
    chosen = parser.parse_args()
    return record(chosen.out, chosen.seed)


if __name__ == "__main__":
    sys.exit(main())
