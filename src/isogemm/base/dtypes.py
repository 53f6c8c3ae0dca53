"""The element types of products: one table of their names, NumPy types, sizes, codes in kernels and words elsewhere.

Whoever needs a type by another name takes it from here: `NUMPY` by the name, `TORCH` by torch's text, `CODE` (by the
name) and `CODE_OF` (by the NumPy type) for what kernels are compiled with, `TRITON` and `PTX` for words of those
languages, `ITEMSIZE` in bytes. `as_dtype` reads what callers write, and `check_dtype` refuses what no product takes.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..errors import DTypeError
from .arguments import nearest, shown

DType = np.dtype[Any]

FLOAT32: DType = np.dtype(np.float32)
BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT16: DType = np.dtype(np.float16)
INT8: DType = np.dtype(np.int8)
INT32: DType = np.dtype(np.int32)


class ElementType(NamedTuple):
    """One row of the table."""

    name: str  # NumPy's and torch's
    dtype: DType
    code: int  # in macros and constants of our kernels
    # triton, ptx: in signatures of Triton's kernels, and in PTX
    triton: str
    ptx: str


TYPES = (
    ElementType("float32", FLOAT32, 0, "fp32", "f32"),
    ElementType("bfloat16", BFLOAT16, 1, "bf16", "bf16"),
    ElementType("float16", FLOAT16, 2, "fp16", "f16"),
)
DTYPES = tuple(t.dtype for t in TYPES)
NUMPY = {t.name: t.dtype for t in TYPES}
WHOLE = {"int8": INT8, "int32": INT32}  # operands and results of exact products, on the CPU
NAMED = NUMPY | WHOLE
INTEGERS = {f"torch.{name}": dtype for name, dtype in WHOLE.items()}
TORCH = {f"torch.{t.name}": t.dtype for t in TYPES}
ITEMSIZE = {t.name: t.dtype.itemsize for t in TYPES}
CODE = {t.name: t.code for t in TYPES}
CODE_OF = {t.dtype: t.code for t in TYPES}
TRITON = {t.name: t.triton for t in TYPES}
PTX = {t.name: t.ptx for t in TYPES}
SHORT_NAMES = {short: t.name for t in TYPES for short in (t.triton, t.ptx)}
"""Short names of dtypes, as models' files and flags have them."""

_NAMES = {t.dtype: t.name for t in TYPES}  # numpy.dtype.name takes 5 us; a call asks for it five times


def name_of(dtype: DType) -> str:
    """A dtype's name, at once for those of the table."""
    return _NAMES.get(dtype) or dtype.name


def torch_name(dtype: Any) -> str:
    """A torch dtype's name, as NumPy has it."""
    return str(dtype).removeprefix("torch.")


def as_dtype(dtype: Any, name: str = "out_dtype") -> DType | None:
    """A NumPy dtype from whatever names one: NumPy's, ml_dtypes', torch's, or a string, such as ``bf16``.

    Raises DTypeError: `dtype` names none.
    """
    if dtype is None:
        return None
    torchs = getattr(sys.modules.get("torch"), "dtype", ())  # nothing of it, or not all yet: another thread imports it
    text = str(dtype).removeprefix("torch.") if isinstance(dtype, torchs) else dtype
    if isinstance(text, str):
        text = SHORT_NAMES.get(text, text)
    if isinstance(text, str) and text == "bfloat16":
        return BFLOAT16
    try:
        return np.dtype(text)
    except (TypeError, ValueError) as error:  # ValueError: an array of another library, say
        meant = nearest(text, NUMPY, "float32") if isinstance(text, str) else "float32"
        raise DTypeError(name, limit="float32, bfloat16 or float16", value=shown(dtype), nearest=meant) from error


FACTORS = ("a", "b", "x", "w")
PREPARED = ("packed w", "array")
"""What `isogemm.pack` and `isogemm.webgpu.array` make ready: floats alone."""
CASTABLE = (*FACTORS, "bias")
"""The operands that ``cast="float32"`` of matmul and linear rounds."""

OF_COMPLEX = "one product for each pair of real and imaginary parts"
OR_INT8 = "int8 where every value fits, exactly, on a CPU"

_NARROW: dict[str | tuple[str, ...], str] = {
    "int8": "int8 with int8 on a CPU, exactly into int32",
    "uint8": "int8 with int8 on a CPU, exactly into int32; quantized weights as isogemm.QuantizedMatrix",
    ("int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"): "int8 with int8 on a CPU, exactly into int32",
    ("int4", "uint4", "int2", "uint2", "qint", "quint"): "quantized weights as isogemm.QuantizedMatrix",
    ("float8", "float4_", "float6_"): "8-bit and shorter floats once they are converted, which is exact",
}  # fmt: skip


def supported(dtype: str) -> str:
    """The legal element types, in words; for a short integer or float, what there is for it besides."""
    bare = dtype.removeprefix("torch.")
    beside = next((words for starts, words in _NARROW.items() if bare.startswith(starts)), "")
    return "float32, bfloat16 or float16" + (f"; {beside}" if beside else "")


def check_dtype(name: str, dtype: DType) -> None:
    """Raise `DTypeError` unless `dtype` is float32, bfloat16 or float16 in native byte order."""
    if dtype not in DTYPES:
        what = "out_dtype" if name == "out_dtype" else f"dtype of {name}"
        value = dtype.name if dtype.isnative else f"{dtype.name} in foreign byte order"
        said = f"{what} is {value}, and products here are of float32, bfloat16 or float16"
        raise DTypeError(what, limit=supported(dtype.name), value=value, nearest=_nearest(name, dtype), said=said)


def _nearest(name: str, dtype: DType) -> str:
    if not dtype.isnative and dtype.newbyteorder("=") in DTYPES:
        return f"{dtype.name} in native byte order"
    if dtype.kind == "c":
        return f"float32, {OF_COMPLEX}"
    if dtype.name.startswith(("float8", "float6_", "float4_")):
        return "bfloat16, which holds it exactly"
    if dtype == INT8:  # where products take it, it is not refused
        return "float32" + ", or the int8 array itself, in products on a CPU" * (name in PREPARED)
    if dtype.name == "uint8" and name in FACTORS:
        return "int8 with int8, or isogemm.quantize(w) for a weight"
    if dtype.kind in "biu" and name in FACTORS:
        return f"float32, or {OR_INT8}"
    castable = dtype.name == "float64" and name in CASTABLE
    return 'float32; cast="float32" of matmul and linear rounds' if castable else "float32"
