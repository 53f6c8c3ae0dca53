"""Operations along rows without gradients: operands checked, viewed where they lie, handed to the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...backends.cpu.rows import run as rows
from ...base.dtypes import BFLOAT16, FLOAT16, FLOAT32, as_dtype, supported
from ...errors import DTypeError, OptionError, ShapeError
from ...operands import memory as views
from ...operands.views import array
from . import cuda as row_cuda
from .checks import check_eps, integers, tensor

__all__ = ["FORWARD", "HOST"]

Array = npt.NDArray[Any]


def _rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, out_dtype: Any) -> Tensor:
    return _norm("rms_norm", x, weight, None, eps, out_dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, out_dtype: Any) -> Tensor:
    return _norm("layer_norm", x, weight, bias, eps, out_dtype)


def _norm(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: Any) -> Tensor:
    source = _rows("x", x)
    check_eps(eps)
    shape = source.shape[-1:]
    found, out = views.empty(source.shape, _dtype(source, out_dtype))
    rows.run(kind, source, out, _row("weight", weight, shape), _row("bias", bias, shape), eps)
    return found


def _elements(kind: str) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, out_dtype: Any = None) -> Tensor:
        source = _rows("x", x)
        found, out = views.empty(source.shape, _dtype(source, out_dtype))
        rows.run(kind, source, out)
        return found

    return forward


def _reduction(kind: str) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, keepdim: bool, out_dtype: Any = None) -> Tensor:
        source = _rows("x", x)
        found, out = views.empty((*source.shape[:-1], *(1,) * keepdim), _dtype(source, out_dtype))
        rows.run(kind, source, out if keepdim else out[..., None])
        return found

    return forward


def _view(name: str, x: Any) -> Array:
    return array(name, tensor(name, x))


def _rows(name: str, x: Any) -> Array:
    viewed = _view(name, x)
    if viewed.ndim == 0:
        raise ShapeError(f"dimensions of {name}", limit="at least 1", value=0, nearest=f"{name}.reshape(1)")
    return viewed


def _row(name: str, x: Any, shape: tuple[int, ...]) -> Array | None:
    if x is None:
        return None
    viewed = _view(name, x)
    if viewed.shape != shape:
        raise ShapeError(f"shape of {name}", limit="that of a row of x", value=viewed.shape, nearest=shape)
    return viewed


def _table(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    viewed = _rows(name, x)
    try:
        if viewed.shape[-1] == shape[-1]:
            return np.broadcast_to(viewed, shape)
    except ValueError:
        pass
    raise ShapeError(f"shape of {name}", limit=f"one that broadcasts to {shape}", value=viewed.shape, nearest=shape)


def _dtype(source: Array, out_dtype: Any) -> np.dtype[Any]:
    wanted = as_dtype(out_dtype)
    if wanted is None:
        return source.dtype
    if wanted not in (FLOAT32, BFLOAT16, FLOAT16):
        raise DTypeError("out_dtype", limit=supported(wanted.name), value=wanted.name, nearest="float32")
    return wanted


def _silu_mul(x: Tensor, y: Tensor, *, out_dtype: Any) -> Tensor:
    source, other = _rows("x", x), _view("y", y)
    if source.shape != other.shape:
        raise ShapeError("shape of y", limit="that of x", value=other.shape, nearest=source.shape)
    found, out = views.empty(source.shape, _dtype(source, out_dtype))
    rows.run("silu_mul", source, out, other)
    return found


def _add(x: Tensor, y: Tensor, *, out_dtype: Any = None) -> Tensor:
    """One sum for each element, which torch rounds correctly; in the dtype of y, and with the NaN of a result."""
    source, other = _rows("x", x), _view("residual", y)
    if source.shape != other.shape:
        raise ShapeError("shape of residual", limit="that of x", value=other.shape, nearest=source.shape)
    name = _dtype(other, out_dtype).name
    h = (x.detach().float() + y.detach().float()).to(getattr(torch, name)).contiguous()
    words, nan = (torch.int32, 0x7FFFFFFF) if name == "float32" else (torch.int16, 0x7FFF)
    h.view(words).masked_fill_(h.isnan(), nan)
    return h


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out_dtype: Any) -> Tensor:
    source = _rows("x", x)
    n = source.shape[-1]
    if n % 2:
        raise ShapeError("last dimension of x", limit="an even number", value=n, nearest=n + 1)
    shape = (*source.shape[:-1], n // 2)
    found, out = views.empty(source.shape, _dtype(source, out_dtype))
    rows.run(
        "rope_interleaved" if interleaved else "rope", source, out, _table("cos", cos, shape), _table("sin", sin, shape)
    )
    return found


def _embedding(weight: Tensor, ids: Tensor) -> Tensor:
    table, index = _view("weight", weight), integers("ids", ids, weight.device)
    if table.ndim != 2:
        raise ShapeError("shape of weight", limit="(rows, n)", value=table.shape, nearest="weight.reshape(-1, n)")
    if index.numel():
        least, most = int(index.min()), int(index.max())
        if least < 0 or most >= len(table):
            bad = least if least < 0 else most
            raise OptionError(
                "ids", limit=f"0 to {len(table) - 1}", value=bad, nearest=min(max(bad, 0), len(table) - 1)
            )
    flat = index.reshape(-1).to(torch.int64)
    return weight.detach().index_select(0, flat).reshape(*index.shape, table.shape[1])


HOST: dict[str, Callable[..., Tensor]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _elements("softmax"),
    "log_softmax": _elements("log_softmax"),
    "silu": _elements("silu"),
    "sigmoid": _elements("sigmoid"),
    "exp": _elements("exp"),
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "silu_mul": _silu_mul,
    "add": _add,
    "rope": _rope,
    "embedding": _embedding,
}


def _on_either(kind: str) -> Callable[..., Tensor]:
    host, device = HOST[kind], row_cuda.FORWARD[kind]

    def forward(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        try:
            there = x.is_cuda
        except AttributeError:  # no tensor: the host's function says so
            there = False
        return device(x, *rest, **options) if there else host(x, *rest, **options)

    return forward


FORWARD: dict[str, Callable[..., Tensor]] = {kind: _on_either(kind) for kind in HOST}
