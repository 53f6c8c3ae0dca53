"""The names of the same calls in cuBLAS, rocBLAS, MKL, Accelerate and here."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass

from ..base.arguments import nearest, of_type
from ..errors import DTypeError, OptionError

LIBRARIES = ("cuBLAS", "rocBLAS", "MKL", "Accelerate", "isogemm")


@dataclass(frozen=True, slots=True)
class CallNames:
    """One call; empty where a library has none.

    Attributes
    ----------
    what : str
        What it computes or sets.
    cublas, rocblas, mkl, accelerate, here : str
        Its names, for float32 where a library has one for each type; several with commas.
    """

    what: str
    cublas: str
    rocblas: str
    mkl: str
    accelerate: str
    here: str

    def names(self) -> dict[str, str]:
        """The names by library, in the order of `LIBRARIES`."""
        return dict(zip(LIBRARIES, astuple(self)[1:], strict=True))

    def __str__(self) -> str:
        lines = [f"{library:<10} {name or 'none'}" for library, name in self.names().items()]
        return "\n".join([self.what, *lines])


CALLS = (
    CallNames(
        "one product", "cublasSgemm", "rocblas_sgemm", "cblas_sgemm", "cblas_sgemm",
        "isogemm.gemm, isogemm.blas.gemm",
    ),
    CallNames(
        "products at a constant stride", "cublasSgemmStridedBatched", "rocblas_sgemm_strided_batched",
        "cblas_sgemm_batch_strided", "", "isogemm.gemm_strided_batched, isogemm.blas.gemm_strided_batched",
    ),
    CallNames(
        "products by an array of pointers", "cublasSgemmBatched", "rocblas_sgemm_batched", "cblas_sgemm_batch", "",
        "isogemm.gemm_batched, isogemm.blas.gemm_batched",
    ),
    CallNames(
        "products of several sizes", "cublasSgemmGroupedBatched", "", "cblas_sgemm_batch", "", "isogemm.gemm_grouped",
    ),
    CallNames(
        "one product, types of its own for each operand", "cublasGemmEx", "rocblas_gemm_ex",
        "cblas_gemm_bf16bf16f32, cblas_gemm_f16f16f32", "", "isogemm.gemm",
    ),
    CallNames(
        "one product of int8 into int32", "cublasGemmEx", "rocblas_gemm_ex", "cblas_gemm_s8u8s32", "",
        "isogemm.matmul",
    ),
    CallNames(
        "a product with a bias", "cublasLtMatmul", "", "", "", "isogemm.linear",
    ),
    CallNames(
        "a matrix by a vector", "cublasSgemv", "rocblas_sgemv", "cblas_sgemv", "cblas_sgemv", "isogemm.matmul",
    ),
    CallNames(
        "matrices by vectors at a constant stride", "cublasSgemvStridedBatched", "rocblas_sgemv_strided_batched",
        "cblas_sgemv_batch_strided", "", "isogemm.gemm_strided_batched",
    ),
    CallNames(
        "a matrix prepared for many products", "", "", "cblas_sgemm_pack, cblas_sgemm_compute", "", "isogemm.pack",
    ),
    CallNames(
        "the math mode", "cublasSetMathMode", "rocblas_set_math_mode", "MKL_BLAS_COMPUTE_MODE", "", "mode=, contract=",
    ),
    CallNames(
        "the same bits in every run", "CUBLAS_WORKSPACE_CONFIG", "rocblas_set_atomics_mode", "MKL_CBWR", "",
        "contract=",
    ),
)  # fmt: skip
"""From the plainest call to settings. rocBLAS leaves biases and groups to hipBLASLt, Accelerate batches to loops."""

_TYPED = re.compile(r"(cublas|rocblas_|cblas_)([sdchz])(gem[mv].*)", re.IGNORECASE)
_HERE = {"s": "float32", "h": "float16"}


def names_of(name: str) -> tuple[CallNames, ...]:
    """The calls that have this name in one of the libraries: MKL's and Accelerate's names are the same, say.

    Parameters
    ----------
    name : str
        For example ``cublasSgemmStridedBatched``; the letter of the type may be S or H.

    Raises
    ------
    DTypeError
        It is the call's name for float64 or for complex numbers, of which there are no products here.
    OptionError
        No library has a call of that name.
    """
    of_type("name", name, str, "the name of a call", "'cublasSgemm'")
    typed = _TYPED.fullmatch(name)
    if typed and typed[2].lower() not in _HERE:
        raise DTypeError(
            name, limit="calls of float32 or float16", value=f"the letter {typed[2]}", nearest=_single(typed)
        )
    plain = (_single(typed) if typed else name).lower()
    found = tuple(call for call in CALLS if any(plain == known.lower() for known in _all_names(call)))
    if not found:
        every = {known.lower(): known for call in CALLS for known in _all_names(call)}
        close = every.get(nearest(plain, every, ""), "cublasSgemm")
        raise OptionError("unknown call", limit="a name in isogemm.blas.CALLS", value=repr(name), nearest=close)
    return found


def _single(typed: re.Match[str]) -> str:
    letter = "S" if typed[1].lower() == "cublas" else "s"
    return f"{typed[1]}{letter}{typed[3]}"


def _all_names(call: CallNames) -> list[str]:
    return [name for text in call.names().values() for name in text.split(", ") if name]
