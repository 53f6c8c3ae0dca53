"""The rest of a transformer's forward pass, one row at a time in a pinned order, on torch tensors.

Each function works along the last dimension, in float32, and rounds once to the output's dtype. A row of a result
depends on the same row of the operands alone: not on how many rows there are, where it stands, on strides, threads or
the processor's vector width. The executable definition, with the order of every step, is `isogemm.contract.rows`.

Sums: element i of a row belongs to lane ``i % 128``; each lane is a chain of additions from +0 in ascending order, and
lanes meet in a binary tree, l with l + 64 first. Every NaN of a result is the canonical one.

Gradients of x are functions of their own row too. Those of a weight and a bias are sums over the rows in `grad_order`,
under ``fma``, those of an embedding's table chains over its rows; all in ascending order from +0, or from a float32
buffer in the parameter's attribute ``main_grad``, which then takes the gradient in place of ``.grad``: so micro-batches
of whole leaves, of any sizes where the order is a chain, have the bits of one batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base import arguments
from .rows import entropy
from .rows.ops import along, together
from .rows.rotations import norm_rope_pair, rope, rope_pair, rope_tables

__all__ = [
    "add_rms_norm",
    "cross_entropy",
    "embedding",
    "exp",
    "layer_norm",
    "log_softmax",
    "mean",
    "norm_rope_pair",
    "rms_norm",
    "rope",
    "rope_pair",
    "rope_tables",
    "sigmoid",
    "silu",
    "silu_mul",
    "softmax",
    "sum",
]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, out_dtype: Any = None, grad_order: str = "chain"
) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` along the last dimension.

    ``v = sum_of_squares / n + eps``, ``r = 1 / sqrt(v)``, ``(x * r) * weight``, every step rounded to float32; the sum
    of squares has the module's order, each step ``fma(x, x, lane)``.

    Parameters
    ----------
    x : Tensor, shape (..., n)
        float32, bfloat16 or float16, any strides, on the CPU or a CUDA device.
    weight : Tensor, shape (n,), optional
        Of any of the three dtypes.
    eps : float
        Rounded to float32.
    out_dtype : dtype, optional
        Default: that of `x`.
    grad_order : str
        Order of the rows' sum in the gradient of `weight`: ``chain``, ``leafL`` (a chain for each L rows of all leading
        dimensions together, and these sums in order) or ``treeN``. A GPU adds the leaves at the same time.

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ShapeError
        `x` has no dimension, or `weight` does not have the length of a row.
    DTypeError
        An operand is not a tensor, or not of a supported dtype.
    DeviceError
        Operands are on different devices, or on one that is neither a CPU nor a CUDA device.
    OptionError
        `eps` is negative or NaN.
    ContractError
        There is no such `grad_order`.
    """
    return along("rms_norm", (x, weight), (eps, out_dtype), grad_order)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, out_dtype: Any = None,
    grad_order: str = "chain",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h = x + residual``, rounded to residual's dtype, and ``rms_norm(h, weight, eps)``: (the norm, h).

    The bits are those of the sum and the norm apart; on CUDA one kernel does both, where no gradient is recorded.

    Parameters
    ----------
    x, residual : Tensor, shape (..., n)
        Of one shape.
    weight : Tensor, shape (n,), optional
    eps : float
    out_dtype : dtype, optional
        Of the norm; default: that of `residual`.
    grad_order : str
        As in `rms_norm`.

    Returns
    -------
    norm, h : Tensor, shape (..., n)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError, ContractError
        As `rms_norm`; also where the shapes of `x` and `residual` differ.
    """
    return together("add_rms_norm", (x, residual, weight), (eps, out_dtype), grad_order)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, out_dtype: Any = None,
    grad_order: str = "chain",
) -> Tensor:  # fmt: skip
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` along the last dimension, with the biased variance.

    ``d = x - sum / n``, ``v = sum_of_squares(d) / n + eps``, ``r = 1 / sqrt(v)``, ``(d * r) * weight + bias``, every
    step rounded to float32.

    Parameters
    ----------
    x : Tensor, shape (..., n)
    weight, bias : Tensor, shape (n,), optional
    eps : float
    out_dtype : dtype, optional
    grad_order : str
        Of the rows' sums in the gradients of `weight` and `bias`, as in `rms_norm`.

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError, ContractError
        As `rms_norm`.
    """
    return along("layer_norm", (x, weight, bias), (eps, out_dtype), grad_order)


def softmax(x: Tensor, *, out_dtype: Any = None) -> Tensor:
    """``exp(x - max) / sum(exp(x - max))`` along the last dimension.

    exp is the pinned one of `isogemm.contract.rows`, within 1 unit in the last place. Elements of -inf behind the end
    of a row (keys that a mask hides) change no bit before them; a row of nothing but -inf is NaN, as in torch.

    Parameters
    ----------
    x : Tensor, shape (..., n)
    out_dtype : dtype, optional

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError
        As `rms_norm`.
    """
    return along("softmax", (x,), (out_dtype,))


def log_softmax(x: Tensor, *, out_dtype: Any = None) -> Tensor:
    """``d - log(sum(exp(d)))`` with ``d = x - max``, along the last dimension.

    exp and log are the pinned ones of `isogemm.contract.rows`, within 1 unit in the last place.

    Parameters and errors as in `softmax`.
    """
    return along("log_softmax", (x,), (out_dtype,))


def cross_entropy(x: Tensor, target: Tensor, *, ignore_index: int = -100, out_dtype: Any = None) -> Tensor:
    """``log(sum(exp(d))) - d[target]`` of each row, with ``d = x - max``: a loss for every token, +0 for those ignored.

    The bits, of the gradient too, are those of ``-log_softmax(x, out_dtype=float32)`` picked at the targets, but for
    the sign of zeros. That is never in memory, nor is its gradient: of each row there are two numbers beside x. The
    mean loss of a step, whatever its batches, is `sum` of all tokens' losses as one row, divided by their number.

    Parameters
    ----------
    x : Tensor, shape (..., n)
        Scores, such as logits.
    target : Tensor of integers, shape (...)
        The class of each row, from 0 to n - 1. On a device one that is not there is an error that torch reports.
    ignore_index : int
        A target that says that a row has no loss.
    out_dtype : dtype, optional
        Default: that of `x`; float32 keeps all of a loss of 16-bit scores.

    Returns
    -------
    Tensor, shape (...)

    Raises
    ------
    OptionError
        A target is negative or not below n, and not `ignore_index`.
    LimitError
        On a CPU, rows of more than 2**24 elements.
    ShapeError, DTypeError, LayoutError, DeviceError
        As `rms_norm`; also where `target` are no integers, or not one for each row.
    """
    return entropy.cross_entropy(x, target, ignore_index, out_dtype)


def sum(x: Tensor, *, keepdim: bool = False, out_dtype: Any = None) -> Tensor:
    """The sum over the last dimension, in the module's order; +0 where there is nothing to add.

    Parameters
    ----------
    x : Tensor, shape (..., n)
    keepdim : bool
        Keep the last dimension, with one element.
    out_dtype : dtype, optional

    Returns
    -------
    Tensor, shape (...) or (..., 1)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError
        As `rms_norm`.
    """
    return along("sum", (x,), (arguments.flag("keepdim", keepdim), out_dtype))


def mean(x: Tensor, *, keepdim: bool = False, out_dtype: Any = None) -> Tensor:
    """The sum over the last dimension, in the module's order, divided by its length; NaN where that is 0.

    Parameters and errors as in `sum`.
    """
    return along("mean", (x,), (arguments.flag("keepdim", keepdim), out_dtype))


def silu_mul(x: Tensor, y: Tensor, *, out_dtype: Any = None) -> Tensor:
    """``(x / (1 + exp(-x))) * y`` for each element: the gate of a SwiGLU block, rounded once.

    exp is the pinned one of `isogemm.contract.rows`. Below x = -88.7, where ``exp(-x)`` overflows, the gate is -0.

    Parameters
    ----------
    x, y : Tensor, shape (..., n)
        Of one shape.
    out_dtype : dtype, optional

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError
        As `rms_norm`; also where the shapes differ.
    """
    return along("silu_mul", (x, y), (out_dtype,))


def silu(x: Tensor, *, out_dtype: Any = None) -> Tensor:
    """``x / (1 + exp(-x))`` for each element: `silu_mul` without the product.

    Parameters and errors as in `softmax`.
    """
    return along("silu", (x,), (out_dtype,))


def sigmoid(x: Tensor, *, out_dtype: Any = None) -> Tensor:
    """``1 / (1 + exp(-x))`` for each element, with the pinned exp of `isogemm.contract.rows`.

    Parameters and errors as in `softmax`.
    """
    return along("sigmoid", (x,), (out_dtype,))


def exp(x: Tensor, *, out_dtype: Any = None) -> Tensor:
    """The pinned exp of `isogemm.contract.rows` for each element, within 1 unit in the last place.

    Parameters and errors as in `softmax`.
    """
    return along("exp", (x,), (out_dtype,))


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """``weight[ids]``: rows copied, bit for bit.

    Parameters
    ----------
    ids : Tensor of integers, shape (...)
    weight : Tensor, shape (rows, n)

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    OptionError
        An id is negative or not below the number of rows.
    ShapeError, DTypeError, DeviceError
        As `rms_norm`; also where `ids` are no integers or `weight` has not two dimensions.
    """
    return along("embedding", (weight, ids), ())
