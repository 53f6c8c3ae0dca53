"""What another process prepares: it compiles a kernel for what that serves, and tries it whatever was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.gpu.cases import Case
from benchmarks.gpu.engine import posed

from isogemm.lab.gpu import bench
from isogemm.planner.admission import Admission


class Kernel:
    """Serves up to 16 rows; what does not fit cannot be bound."""

    def __init__(self) -> None:
        self.bound: list[int] = []

    def supports(self, product: Any, config: str) -> bool:
        return bool(product.m <= 16)

    def bind(self, product: Any, config: str, device: int) -> None:
        if product.m > 16:
            raise MemoryError("no room")
        self.bound.append(product.m)


@pytest.mark.parametrize("state", ["admitted", "refused"])
def test_a_ring_for_few_rows_is_tried_where_the_product_has_many(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tried = Kernel(), []

    def verdict(family: Any, product: Any, config: str) -> Admission:
        tried.append(product.m)
        return Admission(state, "2 of 3 differ")

    here = SimpleNamespace(chooser=SimpleNamespace(families={"ring": kernel}, verdict=verdict))
    monkeypatch.setattr(bench, "open_device", lambda device: here)
    monkeypatch.setattr(bench.logging.getLogger("isogemm"), "setLevel", lambda level: None)
    few, many = (posed(Case("random", "drawn", m, 64, 64)) for m in (8, 64))
    why, offered = bench._prepare(0, ("ring", "s24", (few, many)))
    assert (kernel.bound, tried, offered) == ([8], [64], ())
    assert why.startswith("kernel ring [s24] is not used") == (state == "refused")
