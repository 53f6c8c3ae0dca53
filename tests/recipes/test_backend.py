"""Adding a backend: a folder of its own and one line. The public calls, the errors and the audit follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.products import BF16, F32, values
from tests.recipes.toy_backend import device as toy
from tests.recipes.toy_backend.array import ToyArray

import isogemm
from isogemm import audit, backends
from isogemm.errors import AliasError, ContractError, DeviceError, ShapeError
from isogemm.lab.models import LinearShape


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(backends.BACKENDS, "toy", "tests.recipes.toy_backend.device")


def same(got: object, want: np.ndarray) -> None:
    assert type(got) is ToyArray
    assert got.data.dtype == want.dtype
    word = np.uint16 if want.itemsize == 2 else np.uint32
    np.testing.assert_array_equal(np.ascontiguousarray(got.data).view(word), np.ascontiguousarray(want).view(word))


def test_it_is_a_folder_of_under_150_lines():
    assert sum(len(path.read_text().splitlines()) for path in Path(toy.__file__).parent.glob("*.py")) < 150


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_products_have_the_bits_of_the_cpu(dtype):
    a, b, c = values((5, 9), seed=1).astype(dtype), values((9, 3), seed=2).astype(dtype), values((5, 3), seed=3)
    bias = values((3,), seed=4)
    here = ToyArray
    same(isogemm.matmul(here(a), here(b)), isogemm.matmul(a, b))
    same(isogemm.linear(here(a), here(b.T), here(bias)), isogemm.linear(a, b.T, bias))
    options = {"alpha": -0.7, "beta": 0.3, "bias": bias, "out_dtype": "float32"}
    same(isogemm.gemm(here(a), here(b), here(c), **options | {"bias": here(bias)}), isogemm.gemm(a, b, c, **options))
    sums = c.copy()
    out = here(c.copy())
    assert isogemm.gemm(here(a), here(b), out=out, accumulate=True) is out
    same(out, isogemm.gemm(a, b, out=sums, accumulate=True))


def test_a_part_that_it_lacks_is_named():
    with pytest.raises(DeviceError, match=r"plans: limit: a device whose backend has them; got: toy"):
        isogemm.plan(3, 4, 5, device="toy")


def test_every_form_and_layout():
    a, b = values((4, 1, 5, 6), seed=1), values((3, 6, 7), seed=2)
    same(isogemm.matmul(ToyArray(a), ToyArray(b)), isogemm.matmul(a, b))
    same(isogemm.matmul(ToyArray(a[::2, 0, ::-1]), ToyArray(b[:1])), isogemm.matmul(a[::2, 0, ::-1], b[:1]))
    items = [ToyArray(x) for x in b]
    for got, x in zip(isogemm.gemm_batched(items, items, trans_b="T"), b, strict=True):
        same(got, isogemm.matmul(x, x.T))
    strided = isogemm.gemm_strided_batched(ToyArray(b), ToyArray(b), trans_a="T")
    same(strided, isogemm.gemm_strided_batched(b, b, trans_a="T"))
    same(isogemm.matmul(ToyArray(np.ones((2, 0), F32)), ToyArray(np.ones((0, 3), F32))), np.zeros((2, 3), F32))
    assert isogemm.blas.gemm("N", "N", 2, 2, 2, 1.0, *_flat(4, 1), *_flat(4, 2), 0.0, *_flat(4, 3)).data.shape == (4,)


def _flat(size: int, seed: int) -> tuple[ToyArray, int]:
    return ToyArray(values((size,), seed=seed)), 2


def test_what_it_lacks_is_a_typed_error():
    a, w = ToyArray(values((2, 32))), values((4, 32))
    with pytest.raises(ContractError, match="fma/chain"):
        isogemm.linear(a, a, contract="fma/tree2")
    with pytest.raises(DeviceError, match="packed weights"):
        isogemm.pack(a)
    with pytest.raises(DeviceError, match="one device"):
        isogemm.matmul(a, w.T)
    with pytest.raises(DeviceError, match="quantized weights"):
        isogemm.quantize(w, "Q8_0").to("toy")
    with pytest.raises(ShapeError):
        isogemm.matmul(a, a)
    with pytest.raises(AliasError):
        isogemm.gemm(a, a, trans_b="T", out=ToyArray(a.data[:, :2]))
    with pytest.raises(DeviceError, match="attention"):
        backends.open_device(backends.find("toy")).attention  # noqa: B018


class ToyProvider(audit.Provider):
    """`isogemm.linear` on the toy."""

    name = "toy"

    def __init__(self) -> None:
        super().__init__()
        self.forms["batched"] = self._batched

    def linear(self, x, w):
        return isogemm.linear(ToyArray(x), ToyArray(w)).data

    def _batched(self, x, blocks):
        parts = isogemm.gemm_batched([ToyArray(x)] * len(blocks), [ToyArray(w) for w in blocks], trans_b="T")
        return np.concatenate([part.data for part in parts], axis=1)


def test_the_audit_holds():
    report = audit.run([ToyProvider()], [LinearShape("toy", 5, 6)], require=[], sweep=[1, 2, 9, 16], speed=False)
    (result,) = report.providers.values()
    assert not result.reason
    status = {name: r.status for name, r in result.relations.items()}
    # It packs nothing, and adds up no gradients of its own.
    assert {name for name, x in status.items() if x == "n/a"} == {"packing", "accumulation"}
    assert set(status.values()) == {"held", "n/a"}
