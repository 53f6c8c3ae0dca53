"""The short path for CPU tensors of torch: a product of one dtype by ``fma``, without the checks that others need."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from ...base.dtypes import FLOAT32, NUMPY
from ...contract.spec import as_contract
from ...operands.memory import empty, view
from ...operands.tensors import KINDS, when_seen
from ...problem.settings import PLAIN, Settings
from .gemm.execute import INTO, LINEAR_INTO, again, gemm, gemm_batched, learn

_SMALL = 2**26  # elements; results below are allocated without asking how much memory there is
_AXES = {"matmul": (2, 3), "gemm_strided_batched": (3,)}  # of operands that need not be seen as others
_DTYPES: dict[Any, np.dtype[Any]] = {}
when_seen(lambda torch: _DTYPES.update({getattr(torch, name): dtype for name, dtype in NUMPY.items()}))


@lru_cache(maxsize=64)
def _named(contract: str) -> Settings:
    return Settings(as_contract(contract))


def _known(dtype: Any) -> np.dtype[Any] | None:
    try:
        return _DTYPES.get(dtype)
    except TypeError:  # it cannot be looked up, whatever it is: the long path says what is wrong
        return None


def recall(kind: str, a: Any, b: Any, bias: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """The product, in a new tensor or in `out`; None where the long way has to look."""
    if b is None or type(b) not in KINDS:
        return None
    if len(options) == 3:
        accumulate, contract, out_dtype = options
        alpha = 1.0
    else:
        accumulate, contract, alpha, out_dtype, trans_a, trans_b = options
        if not (type(trans_a) is type(trans_b) is str and trans_a == trans_b == "N"):
            return None
    dtype = _DTYPES.get(a.dtype) if a.dtype is b.dtype else None
    if dtype is None or type(accumulate) is not bool or (accumulate and out is None):
        return None
    into = dtype if out_dtype is None else _known(out_dtype)
    asked = PLAIN
    if contract is not None:
        asked = _named(contract) if type(contract) is str else Settings(as_contract(contract))
    if alpha != 1:
        asked = Settings.checked(asked.contract, alpha=alpha)
    if into is None or asked.contract.arithmetic != "fma" or (out is not None and out_dtype is not None):
        return None
    if b.get_device() >= 0 or ((a.requires_grad or b.requires_grad) and sys.modules["torch"].is_grad_enabled()):
        return None
    lead, axes = None, a.dim()
    if kind == "matmul" and axes > 3:  # one stack, where the matrices lie one behind another
        lead = a.shape[:-2]
        if out is not None or lead != b.shape[:-2] or not (a.numel() and b.numel()):
            return None
        if not (a.is_contiguous() and b.is_contiguous()):
            return None
    elif axes not in _AXES.get(kind, (2,)):
        if kind != "linear" or out is not None or not a.is_contiguous() or axes == 0:
            return None
        lead = a.shape[:-1]
    xa, xb, xbias = view(a, dtype), view(b, dtype), None
    if xa is None or xb is None or not (xa.flags.aligned and xb.flags.aligned):
        return None
    if lead is not None and kind == "matmul":
        xa, xb = xa.reshape(-1, *xa.shape[-2:]), xb.reshape(-1, *xb.shape[-2:])
    elif lead is not None and xa.size:
        xa = xa.reshape(-1, xa.shape[-1])
    if xb.ndim != xa.ndim:
        return None
    form = LINEAR_INTO if kind == "linear" else INTO
    n = xb.shape[0 if form == LINEAR_INTO else -1]
    if bias is not None:
        xbias = _viewed(bias)
        if xbias is None or xbias.shape != (n,):
            return None
    if xa.ndim == 3:
        if out is not None:
            return None
        return _stacked(xa, xb, xbias, into, asked, lead)
    m, k = xa.shape
    if k != xb.shape[1 if form == LINEAR_INTO else 0] or not 0 < m * n <= _SMALL:
        return None
    if out is not None:
        return _into(form, xa, xb, xbias, out, asked, accumulate=accumulate)
    found, result = empty((m, n) if lead is None else (*lead, n), into)
    if lead is not None:
        result = result.reshape(m, n)
    _compute(form, xa, xb, xbias, result, asked)
    return found


def _compute(form: int, a: Any, b: Any, bias: Any, out: Any, asked: Settings) -> None:
    """x @ w.T or a @ b, or of each item of stacks, as a call like this one did if one came before."""
    if asked is PLAIN and again(form, a, b, out, bias) is not None:
        return
    if out.ndim == 3:
        gemm_batched(a, b, out, asked, bias=bias)
    else:
        gemm(a, b.T if form == LINEAR_INTO else b, out, asked, bias=bias)
    if asked is PLAIN and (bias is None or out.ndim == 2):
        learn(form, a, b, out, bias)


def _stacked(a: Any, b: Any, bias: Any, into: Any, asked: Settings, lead: Any) -> Any:
    """a[i] @ b[i]; a matrix that all items share makes them one product, which is left to the long way.

    `lead`: the axes that the stack had, where it had several.
    """
    (count, m, k), n = a.shape, b.shape[-1]
    shared = count > 1 and b.strides[0] == 0
    if b.shape[:2] != (count, k) or shared or not 0 < count * m * n <= _SMALL:
        return None
    found, result = empty((*lead, m, n) if lead else (count, m, n), into)
    _compute(INTO, a, b, bias, result.reshape(count, m, n), asked)
    return found


def _into(form: int, a: Any, b: Any, bias: Any, out: Any, asked: Settings, *, accumulate: bool) -> Any:
    """The product in a tensor of the caller's, from which an accumulated walk starts."""
    target = _viewed(out)
    if (
        target is None
        or (accumulate and asked.contract.order.kind in ("tree", "lanes"))
        or target.dtype is not (FLOAT32 if accumulate else a.dtype)
        or target.shape != (a.shape[0], b.shape[0 if form == LINEAR_INTO else 1])
        or not target.flags.carray
        or any(x is not None and np.may_share_memory(target, x) for x in (a, b, bias))
    ):
        return None
    if accumulate:
        walk = Settings(asked.contract, asked.alpha, accumulate=True)
        gemm(a, b.T if form == LINEAR_INTO else b, target, walk, c=target, bias=bias)
    else:
        _compute(form, a, b, bias, target, asked)
    return out


def _viewed(x: Any) -> Any:
    """A CPU tensor as an array; None where it has no plain memory or takes part in a gradient."""
    if type(x) not in KINDS or x.get_device() >= 0:
        return None
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        return None
    dtype = _DTYPES.get(x.dtype)
    found = None if dtype is None else view(x, dtype)
    return found if found is None or found.flags.aligned else None
