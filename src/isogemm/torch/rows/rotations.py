"""Rotary position embeddings, one row at a time in a pinned order; part of `isogemm.torch.reductions`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...base import arguments
from ...errors import OptionError, ShapeError
from ..operator import define_forward, watched
from .ops import along, together
from .signature import integers


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out_dtype: Any = None) -> Tensor:
    """Rotary position embedding: pairs (a, b) of a row become ``(a * cos - b * sin, b * cos + a * sin)``.

    Pair j is ``(x[j], x[j + n/2])``, as in Llama and Qwen checkpoints of the transformers package, or
    ``(x[2j], x[2j + 1])`` when `interleaved`. Products and sums are each rounded to float32, without fma.

    Parameters
    ----------
    x : Tensor, shape (..., n)
        n is even.
    cos, sin : Tensor
        Broadcast to (..., n/2): for x of shape (batch, heads, tokens, n), tables of shape (tokens, n/2) will do. See
        `rope_tables`. Of tables that hold every angle twice, take the first half: ``cos[..., : n // 2]``.
    interleaved : bool
    out_dtype : dtype, optional

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError
        As `rms_norm`; also where n is odd, the tables do not fit, or they require grad.
    """
    return along("rope", (x, cos, sin), (arguments.flag("interleaved", interleaved), out_dtype))


def rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out_dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """`rope` of queries and keys; on CUDA in one launch, where no gradient is recorded.

    Parameters
    ----------
    q, k : Tensor, shape (..., n)
        Their leading dimensions may differ.
    cos, sin : Tensor
        Broadcast to the rows of both.
    interleaved : bool
    out_dtype : dtype, optional

    Returns
    -------
    q, k : Tensor
        Rotated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError
        As `rope`.
    """
    return together("rope_pair", (q, k, cos, sin), (arguments.flag("interleaved", interleaved), out_dtype))


def norm_rope_pair(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
    out_dtype: Any = None,
    grad_order: str = "chain",
) -> tuple[Tensor, Tensor]:
    """``rope(rms_norm(q, q_weight, eps), cos, sin)`` and the same of k, as in Qwen3's attention.

    The norms are rounded to the dtypes of q and k before they are rotated, so the bits are those of the operations
    apart; on CUDA one kernel does all, where no gradient is recorded.

    Parameters
    ----------
    q, k : Tensor, shape (..., n)
        Their leading dimensions may differ.
    q_weight, k_weight : Tensor, shape (n,), or None
    cos, sin : Tensor
        Broadcast to (..., n/2) of both.
    eps : float
    interleaved : bool
    out_dtype : dtype, optional
    grad_order : str
        Of the rows' sums in the gradients of the weights, as in `rms_norm`.

    Returns
    -------
    q, k : Tensor
        Normalised and rotated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError, ContractError
        As `rms_norm` and `rope`.
    """
    options = (eps, arguments.flag("interleaved", interleaved), out_dtype)
    return together("norm_rope_pair", (q, k, q_weight, k_weight, cos, sin), options, grad_order)


def rope_tables(positions: Tensor, n: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position * theta**(-2 * j / n)`` for j below n/2, as `rope` takes them.

    Angles are float64, each taken alone through the C library's functions, and rounded once to float32: a position's
    row is the same in any table, on one machine. Across machines the C libraries have to agree.

    Parameters
    ----------
    positions : Tensor of integers, shape (...)
    n : int
        Length of a head's row, even.
    theta : float
        Positive.

    Returns
    -------
    cos, sin : Tensor of float32, shape (..., n/2)

    Raises
    ------
    ShapeError
        `n` is odd or negative.
    DTypeError
        `positions` are no integers.
    OptionError
        `theta` is zero, negative or not finite.
    """
    n, theta = arguments.whole("n", n), arguments.number("theta", theta)
    if n < 0 or n % 2:
        raise ShapeError("n", limit="an even number", value=n, nearest=max(0, n + 1))
    if not 0 < theta < math.inf:
        raise OptionError("theta", limit="a positive number", value=theta, nearest=10000.0)
    positions = integers("positions", positions, torch.device("cpu"))
    call = _tables if watched(positions) == "direct" else _tables_operator
    found: tuple[Tensor, Tensor] = call(positions, n, theta)
    return found


def _tables(positions: Tensor, n: int, theta: float) -> tuple[Tensor, Tensor]:
    frequencies = [theta ** (-2.0 * j / n) for j in range(n // 2)]
    known: dict[int, list[list[float]]] = {}
    for p in (flat := positions.reshape(-1).tolist()):
        if p not in known:
            known[p] = [[f(p * w) for w in frequencies] for f in (math.cos, math.sin)]
    shape = (*positions.shape, n // 2)
    cos, sin = (torch.tensor([known[p][i] for p in flat], dtype=torch.float32).reshape(shape) for i in (0, 1))
    return cos, sin


def _shown_tables(positions: Tensor, n: int, theta: float) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, n // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


# Angles are the C library's, which a compiler has none of.
_tables_operator = define_forward(
    "rope_tables", "(Tensor positions, int n, float theta) -> (Tensor, Tensor)", {"CPU": _tables}, _shown_tables
)
