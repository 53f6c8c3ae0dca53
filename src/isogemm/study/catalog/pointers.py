"""An array of pointers against a strided batch, on small matrices: 64 x 64, 4 to 1024 of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..charts import lines, times, words
from ..declare import Figure, Row, Study, StudyCase
from ..site import Site
from .four_methods import method_case

SIZE, BATCHES = 64, (4, 64, 1024)
METHODS = ("strided", "pointers", "loop")


def cases(site: Site, quick: bool) -> list[StudyCase]:
    """The three batches, by pointers, strides and a loop."""
    batches = BATCHES[:2] if quick else BATCHES
    return [method_case(SIZE, k, "fp32", methods=METHODS, clocks=("device", "wall", "submit")) for k in batches]


def figures(rows: Sequence[Row]) -> list[Figure]:
    """What pointers cost beside a constant stride, by each clock."""
    found = (_cost(rows, clock) for clock in ("device", "wall", "submit"))
    return [figure for figure in found if figure]


def _cost(rows: Sequence[Row], clock: str) -> Figure | None:
    data = []
    for row in rows:
        timed = times(row, clock)
        strided = {way.split()[1]: t["median"] for way, t in timed.items() if way.startswith("strided")}
        for way, timing in timed.items():
            method, library = way.split()
            peer = strided.get("torch" if library == "cuBLAS" else library)
            if peer and method != "strided":
                data.append({"way": way, "batch": row["facts"]["k"], "cost": timing["median"] / peer})
    if not data:
        return None
    ours = {point["batch"]: point["cost"] for point in data if point["way"] == "pointers isogemm"}
    first, last = min(ours), max(ours)
    title = (
        f"{CLOCKS[clock]}: pointers are {words(1 / ours[first], 'strides')} for {first} products, "
        f"{words(1 / ours[last], 'strides')} for {last}"
    )
    chart = lines(
        data, "batch", "cost", titles=("products", "time / strided batch of the same library"), log=(True, True)
    )
    return Figure(title, chart, SENTENCES[clock])


CLOCKS = {"device": "On the device", "wall": "Wall time", "submit": "To enqueue"}
SENTENCES = {
    "device": "Pointers are one more read from memory for each product.",
    "wall": "A list of arrays is looked at item by item on the host, before anything is launched; a stack is not.",
    "submit": "What the host does for each call: a loop launches as many kernels as there are products.",
}

STUDY = Study("pointers", "What does an array of pointers cost beside a constant stride?", cases, figures)
