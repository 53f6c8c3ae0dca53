"""`isogemm.metal`: the kernels as Metal Shading Language, and a linear layer by them where torch has MPS.

No Apple GPU has run this text yet. The tests compile it as C++ and run its threads in turns, so indices, tails and bits
are known; what Metal's compiler and hardware make of it is not. So `linear` compares every bit of a small product with
the definition before it uses a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...base.arguments import of_type, one_of
from ...base.dtypes import torch_name
from ...base.extras import require_extra
from ...contract import golden, reference
from ...contract.compare import first_mismatch
from ...contract.spec import Order
from ...errors import ContractError, DeviceError, DTypeError, LayoutError, LimitError, ShapeError
from ...operands.tensors import check_tensor

FOLDER = Path(__file__).parent / "msl"
HERE = "mps"  # the device of torch's tensors
TYPES = {"float16": "half", "float32": "float"}
MOST = 2**31  # what kernels count with: extents and elements are below it
EXTENTS = (11, 35, 100)  # m, n, k of the product that is compared


@dataclass(frozen=True, slots=True)
class MslKernel:
    """A kernel: its contract, the rows and columns that a threadgroup computes, and its threads."""

    contract: str
    rows: int
    columns: int
    threads: int


KERNELS = {
    "gemv_naive": MslKernel("fma/chain", 1, 64, 64),
    "gemv_simd": MslKernel("fma/lanes32", 1, 4, 128),
    "gemv_simd_multi": MslKernel("fma/lanes32", 1, 8, 64),
    "gemv_batched": MslKernel("fma/lanes32", 8, 2, 64),
    "gemm_tiled": MslKernel("fma/chain", 32, 32, 256),
    "gemm_simdgroup": MslKernel("fma/chain", 8, 8, 32),
    "gemv_q4_0": MslKernel("int32/chain", 1, 64, 64),
}


def source(name: str, dtype: str = "float16") -> str:
    """The text of a kernel, which compiles by itself.

    Parameters
    ----------
    name : str
        One of `KERNELS`.
    dtype : {"float16", "float32"}
        Of x and w.

    Raises
    ------
    OptionError
        There is no such kernel.
    DTypeError
        Another type.
    """
    one_of("Metal kernel", name, tuple(KERNELS), "'gemv_simd'")
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise DTypeError("operands in Metal", limit="float16 or float32", value=dtype, nearest="float16")
    texts = [(FOLDER / f"{part}.metal").read_text(encoding="utf-8") for part in ("common", name)]
    return "\n".join(["#include <metal_stdlib>", *texts]).replace(
        "using namespace metal;", f"using namespace metal;\ntypedef {TYPES[dtype]} T;"
    )


def linear(x: Any, w: Any, kernel: str = "gemv_simd") -> Any:
    """x [m, k] @ w [n, k].T in float32, of contiguous tensors on ``mps``, by a kernel that is compared first.

    Raises
    ------
    DeviceError
        torch has no MPS here, or the operands are elsewhere.
    ShapeError, DTypeError, LimitError, LayoutError, OptionError
        Operands that do not fit, are too large or not contiguous, or record gradients; or no such kernel of floats.
    ContractError
        The kernel's bits are not those of its contract on this GPU.
    """
    require_extra("torch", "isogemm.metal.linear", "torch")
    one_of("kernel of metal.linear", kernel, tuple(name for name in KERNELS if name != "gemv_q4_0"), "'gemv_simd'")
    _check(x, w)
    dtype = torch_name(x.dtype)
    refused = _refused(kernel, dtype)
    if refused:
        limit = f"the bits of {KERNELS[kernel].contract}"
        raise ContractError(f"{kernel} on this GPU", limit=limit, value=refused, nearest="isogemm.linear on the CPU")
    return _launched(kernel, dtype, x, w)


def _check(x: Any, w: Any) -> None:
    """Refuse operands that kernels do not take."""
    import torch

    operands = ("x", x), ("w", w)
    for name, each in operands:
        of_type(f"{name} of metal.linear", each, torch.Tensor, "a torch tensor", f"torch.from_numpy({name}).to('mps')")
        if not torch.backends.mps.is_available() or each.device.type != HERE:
            place = str(each.device)
            raise DeviceError(f"{name} of metal.linear", limit="tensors on mps", value=place, nearest="isogemm.linear")
        if torch_name(each.dtype) not in TYPES:
            raise DTypeError(
                f"{name} of metal.linear", limit="float16 or float32", value=torch_name(each.dtype), nearest="float16"
            )
        check_tensor(name, each)
        if each.is_neg():
            limit = "a tensor with plain memory"
            raise LayoutError(name, limit=limit, value="a lazy negation", nearest=f"{name}.resolve_neg()")
    if x.dtype != w.dtype:
        both = f"{torch_name(x.dtype)} and {torch_name(w.dtype)}"
        raise DTypeError("operands of metal.linear", limit="one type of floats", value=both, nearest="w.to(x.dtype)")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        shapes = f"{list(x.shape)} and {list(w.shape)}"
        raise ShapeError(
            "operands of metal.linear", limit="x [m, k] and w [n, k]", value=shapes, nearest="two matrices"
        )
    (m, k), n = x.shape, len(w)
    most = max(m, n, k, m * k, n * k, m * n)
    if most >= MOST:
        raise LimitError("elements of metal.linear", limit=f"below {MOST}", value=most, nearest="fewer rows at once")
    for name, each in operands:
        if not each.is_contiguous():
            raise LayoutError(
                f"strides of {name}", limit="rows side by side", value=each.stride(), nearest=f"{name}.contiguous()"
            )


@cache
def _refused(kernel: str, dtype: str) -> str:
    """What was wrong with a kernel's bits on a golden product; empty where nothing was."""
    import torch

    m, n, k = EXTENTS
    a, b = (words.view(dtype) for words in golden.operands(golden.GoldenCase(Order(), k), dtype, dtype))
    a, b = a[:m], b[:, [j % b.shape[1] for j in range(n)]]
    tensors = [torch.from_numpy(each.copy()).to(HERE) for each in (a, b.T)]
    got = _launched(kernel, dtype, *tensors).cpu().numpy()
    mismatch = first_mismatch(got, reference.evaluate(a, b, KERNELS[kernel].contract))
    return "" if mismatch is None else str(mismatch)


def _launched(kernel: str, dtype: str, x: Any, w: Any) -> Any:
    import torch

    made, (m, k), n = KERNELS[kernel], x.shape, len(w)
    out = torch.empty((m, n), dtype=torch.float32, device=x.device)
    if out.numel():
        shape = torch.tensor([m, n, k], dtype=torch.int32, device=x.device)
        grid = -(-n // made.columns) * made.threads, -(-m // made.rows), 1
        getattr(_compiled(kernel, dtype), kernel)(x, w, out, shape, threads=grid, group_size=(made.threads, 1, 1))
    return out


@cache
def _compiled(kernel: str, dtype: str) -> Any:
    import torch

    return torch.mps.compile_shader(source(kernel, dtype))
