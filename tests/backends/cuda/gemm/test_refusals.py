"""What a call on the GPU may not be: a typed error before any launch, with the output as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.backends.cuda.device import BF16, Guarded, draw, same, torch

import isogemm
from isogemm import errors

pytestmark = pytest.mark.gpu


def operands() -> tuple[Any, Any, Guarded]:
    return draw((8, 32), BF16.dtype, 1), draw((32, 16), BF16.dtype, 2), Guarded((8, 16), BF16.dtype)


REFUSED: dict[str, tuple[type[Exception], Callable[[Any, Any, Any], Any]]] = {
    "inner dimensions": (errors.ShapeError, lambda a, b, out: isogemm.matmul(a, b.T, out=out)),
    "shape of out": (errors.ShapeError, lambda a, b, out: isogemm.matmul(a[:5], b, out=out)),
    "dtypes that differ": (errors.DTypeError, lambda a, b, out: isogemm.matmul(a, b.half(), out=out)),
    "dtype of out": (errors.DTypeError, lambda a, b, out: isogemm.matmul(a.float(), b.float(), out=out)),
    "integers": (errors.DTypeError, lambda a, b, out: isogemm.matmul(a.int(), b.int(), out=out)),
    "a on the host": (errors.DeviceError, lambda a, b, out: isogemm.matmul(a.cpu(), b, out=out)),
    "b on the host": (errors.DeviceError, lambda a, b, out: isogemm.matmul(a, b.cpu(), out=out)),
    "C on the host": (errors.DeviceError, lambda a, b, out: isogemm.gemm(a, b, out.cpu(), beta=1.0, out=out)),
    "bias on the host": (errors.DeviceError, lambda a, b, out: isogemm.gemm(a, b, bias=b[0].cpu(), out=out)),
    "alpha not finite": (errors.OptionError, lambda a, b, out: isogemm.gemm(a, b, alpha=float("inf"), out=out)),
    "beta is NaN": (errors.OptionError, lambda a, b, out: isogemm.gemm(a, b, out, beta=float("nan"), out=out)),
    "beta without C": (errors.OptionError, lambda a, b, out: isogemm.gemm(a, b, beta=0.5, out=out)),
    "accumulate in 16 bits": (errors.DTypeError, lambda a, b, out: isogemm.matmul(a, b, out=out, accumulate=True)),
    "a contract of float32": (errors.DTypeError, lambda a, b, out: isogemm.matmul(a, b, out=out, contract="tf32:sm90")),
    "no such contract": (errors.ContractError, lambda a, b, out: isogemm.matmul(a, b, out=out, contract="fast")),
    "gradients": (errors.OptionError, lambda a, b, out: isogemm.matmul(a.requires_grad_(), b, out=out)),
    "sparse": (errors.LayoutError, lambda a, b, out: isogemm.matmul(a.to_sparse(), b, out=out)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    kind, call = REFUSED[name]
    a, b, out = operands()
    before = out.view.clone()
    for _ in range(2):  # the second time past whatever the first one left in tables
        with pytest.raises(kind):
            call(a, b, out.view)
    out.check(before)
    a = a.detach()
    same(isogemm.matmul(a, b, out=out.view), isogemm.matmul(a, b))  # and the next call is served


def test_outputs_that_share_memory_with_an_operand() -> None:
    a = draw((64, 64), BF16.dtype, 1)
    before = a.clone()
    for out in (a, a.T, a[:, :]):
        with pytest.raises(errors.AliasError):
            isogemm.matmul(a, a, out=out)
    isogemm.matmul(a, a, out=torch.empty_like(a))  # fills the short path's table
    with pytest.raises(errors.AliasError):
        isogemm.matmul(a, before, out=a)
    with pytest.raises((errors.AliasError, errors.LayoutError)):
        isogemm.matmul(a, a, out=torch.empty(64, dtype=a.dtype, device="cuda").expand(64, 64))
    same(a, before)


def test_pointers_that_are_null_foreign_or_too_short() -> None:
    a = draw((8, 32), BF16.dtype, 1)
    host = torch.zeros(4096, dtype=torch.bfloat16)
    for addresses, kind in (
        ([a.data_ptr(), 0], errors.LayoutError),
        ([a.data_ptr(), a.data_ptr() + 1], errors.LayoutError),
        ([a.data_ptr(), host.data_ptr()], errors.DeviceError),
        ([host.data_ptr(), a.data_ptr()], errors.DeviceError),
    ):
        for given in (addresses, torch.tensor(addresses, device="cuda")):
            with pytest.raises(kind, match=r"item \d"):
                isogemm.PointerArray(given, (8, 32), "bfloat16")
    with pytest.raises(errors.LayoutError):
        isogemm.PointerArray([a.data_ptr()], (1 << 20, 1 << 20), "bfloat16")
    with pytest.raises(errors.DTypeError):
        isogemm.PointerArray([1.5], (8, 32), "bfloat16")
