"""Draw what each mistake of the doctor's bank looks like: where a small product is wrong, and by how much.

    python -m tools.draw_mistakes            # writes docs/pictures/mistakes.svg

Each panel is a corner of the result of one drawn call with the mistake planted: grey is right; the darker, the further
off, up to the panel's largest error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import typer

from isogemm.base.disk import write_whole
from isogemm.doctor.bank import MISTAKES
from isogemm.doctor.case import GemmCall
from isogemm.doctor.selftest import FORMS, drawn, planted, raced
from isogemm.doctor.simulate import explained, simulate

OUT = Path(__file__).parents[1] / "docs" / "pictures" / "mistakes.svg"
COLUMNS, CELL, SIDE, GAP, LEVELS = 6, 6, 16, 22, 5


def errors(name: str) -> npt.NDArray[np.float64]:
    """Errors of the last rows and columns of an item, 0 to 1 of their largest; of the first call that shows it."""
    for turn in range(200):
        rng = np.random.default_rng(turn)
        case = drawn(rng, FORMS[turn % len(FORMS)], "float32")
        if min(case.sizes[:2]) < SIDE:
            continue
        for left, item in itertools.product(results(name, case, rng), range(case.items)):
            at = case.c.positions()[item, -SIDE:, -SIDE:].reshape(-1)
            right = simulate(case, at)
            with np.errstate(all="ignore"):
                off = np.abs(left[at] - right.value)
            off = np.where(explained(left[at], right), 0.0, np.nan_to_num(off, nan=1.0, posinf=1.0))
            if off.any():
                return (off / off.max()).reshape(SIDE, SIDE)
    raise LookupError(name)


def results(name: str, case: GemmCall, rng: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
    """What calls with the mistake leave; each time another one."""
    if name == "race":
        yield raced(case, rng)
    some = list(MISTAKES[name].variants(case))
    yield from (planted(variant.case, rng) for variant in some[len(some) // 2 :])


def picture() -> str:
    """The panels as one SVG; one that is right within rounding has nothing to show."""
    shown = [name for name in MISTAKES if name != "other-order"]
    width, step = COLUMNS * (SIDE * CELL + 24) + 8, SIDE * CELL + GAP + 8
    rows = -(-len(shown) // COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * step + 8}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, name in enumerate(shown):
        x, y = 8 + place % COLUMNS * (SIDE * CELL + 24), 8 + place // COLUMNS * step
        parts.append(f'<text x="{x}" y="{y + 12}" font-size="11">{name}</text>')
        parts.append(f'<rect x="{x}" y="{y + 17}" width="{SIDE * CELL}" height="{SIDE * CELL}" fill="#f4f4f4"/>')
        top, shades = y + 17, np.ceil(LEVELS * errors(name) ** 0.5)
        for shade in range(1, LEVELS + 1):
            cells = [
                f"M{x + j * CELL} {top + i * CELL}h{CELL}v{CELL}h-{CELL}z" for i, j in np.argwhere(shades == shade)
            ]
            parts.append(f'<path fill="#b2182b" fill-opacity="{shade / LEVELS:.2f}" d="{"".join(cells)}"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Write docs/pictures/mistakes.svg."""
    write_whole(OUT, picture())
    print(OUT)


if __name__ == "__main__":
    typer.run(main)
