"""Products as values: shapes, dtypes, layouts and forms, all checked before anything is computed or written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.arguments import nearest_float32
from ..base.dtypes import FLOAT32, INT8, INT32, check_dtype, name_of
from ..contract.spec import Contract, check_exact
from ..errors import ContractError, DTypeError, LayoutError, OptionError, ShapeError
from ..operands.aliasing import check_apart, check_no_self_overlap, same_elements

Array = NDArray[Any]
DType = np.dtype[Any]


class Settings(NamedTuple):
    """What a public call asks for besides its operands; build it with `Settings.checked`.

    The checks here and `isogemm.api.dispatch` read it, and a backend gets it as it is.
    """

    contract: Contract
    # alpha, beta: already rounded to float32
    alpha: float = 1.0
    beta: float = 0.0
    accumulate: bool = False  # the walk over K starts from the float32 C
    out_dtype: DType | None = None  # None: decided by the operands, see `result_dtype`

    @classmethod
    def checked(
        cls,
        contract: Contract,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        accumulate: bool = False,
        out_dtype: DType | None = None,
    ) -> Settings:
        """Settings whose scalars are finite in float32 and whose flags fit each other.

        Raises
        ------
        OptionError
            A scalar is not a finite real number, or `accumulate` is not a bool or comes with a beta.
        ContractError
            `accumulate` with a tree or lanes, which have no running total to start from.
        DTypeError
            `out_dtype` is not float32, bfloat16 or float16; under ``exact``, not int32.
        """
        if not isinstance(accumulate, bool | np.bool_):
            nearest = isinstance(accumulate, int) and accumulate != 0
            raise OptionError("accumulate", limit="True or False", value=repr(accumulate), nearest=nearest)
        alpha, beta = _scalar("alpha", alpha), _scalar("beta", beta)
        if accumulate and beta != 0:
            raise OptionError("beta with accumulate=True", limit="0: the walk starts from C", value=beta, nearest=0)
        if accumulate and contract.order.kind in ("tree", "lanes"):
            raise ContractError(
                "accumulate=True", limit="an order with a running total", value=str(contract), nearest="chain or leafL"
            )
        if contract.arithmetic == "exact":
            _check_exact(alpha, beta, accumulate, out_dtype)
        elif out_dtype is not None:
            check_dtype("out_dtype", out_dtype)
        return cls(contract, alpha, beta, bool(accumulate), out_dtype)

    @property
    def reads_c(self) -> bool:
        """Whether a single element of C is read."""
        return self.accumulate or self.beta != 0

    def result_dtype(self, a: DType, b: DType) -> DType:
        """Dtype of the result: `out_dtype`, else float32 with `accumulate` (it is a running sum), else the operands'.

        Operands agree, or one is float32 and the other bfloat16 or float16 (``fma`` only, where the
        conversion to float32 is exact). The result is float32 then, as NumPy has it: a half type could not hold it.
        """
        names = self.contract.operands
        if name_of(a) not in names or name_of(b) not in names:
            raise DTypeError(
                f"operand dtypes under {self.contract}",
                limit=" or ".join(names) or "a quantized w",
                value=f"{a.name} and {b.name}",
                nearest=_nearest_contract(a, b, names),
            )
        check_pair(a.name, b.name, self.contract)
        if self.contract.arithmetic == "exact":
            return INT32
        if self.out_dtype is not None:
            return self.out_dtype
        return FLOAT32 if self.accumulate or b == FLOAT32 else a


PLAIN = Settings(Contract())


def check_product(
    a: Array,
    b: Array,
    c: Array | None,
    bias: Array | None,
    out: Array | None,
    settings: Settings,
    named: tuple[str, str, str] = ("a", "b", "out"),
) -> DType:
    """The dtype of the result of a [..., m, k] @ b [..., k, n] (equal leading dims); raises before any write.

    `named` is what the caller has for a, b and out.

    Raises ShapeError, DTypeError, LayoutError or AliasError: as `check_operand`, `check_out` and `check_bias`.
    """
    check_operand(named[0], a, INT8)
    check_operand(named[1], b, INT8)
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise mismatch(a.shape, b.shape)
    shape = (*a.shape[:-1], b.shape[-1])
    dtype = settings.result_dtype(a.dtype, b.dtype)
    check_integers(a.shape[-1], bias, settings)
    if c is not None:
        _check_c(c, shape, dtype, settings)
    if settings.reads_c and c is None:
        raise OptionError("C is read but not given", limit="c, an array", value=None, nearest="pass c, or beta=0")
    if bias is not None:
        check_bias(bias, shape[-1])
    if out is not None:
        reads = ((named[0], a), (named[1], b), ("bias", bias))
        check_out(out, shape, dtype, reads, c if settings.reads_c else None, name=named[2])
    return dtype


def mismatch(a: tuple[int, ...], b: tuple[int, ...]) -> ShapeError:
    value = f"a {list(a)} and b {list(b)}"
    if a[-1] == b[-2]:
        return ShapeError("batch dimensions", limit="equal in a and b", value=value, nearest=f"b {[*a[:-2], *b[-2:]]}")
    nearest = f"b {[*b[:-2], a[-1], b[-1]]}"
    if a[-1] == b[-1]:
        nearest += ", or is b a weight [n, k]? linear(x, w), or w.T"
    said = f"inner dimensions differ: a is {list(a)}, b is {list(b)}; b needs {a[-1]} rows"
    return ShapeError("inner dimensions", limit="columns of a = rows of b", value=value, nearest=nearest, said=said)


def check_pair(a: str, b: str, contract: Contract) -> None:
    """Raise a DTypeError of operands of two types, unless ``fma`` widens one of them to the other, float32."""
    if a != b and (contract.arithmetic != "fma" or FLOAT32.name not in (a, b)):
        limit = "equal, or under fma one of them float32"
        raise DTypeError(f"operand dtypes under {contract}", limit=limit, value=f"{a} and {b}", nearest=f"both {a}")


def check_integers(k: int, bias: Array | None, settings: Settings) -> None:
    """Raise where the exact product of integers has a bias, or sums that might not fit into int32.

    Raises LimitError or OptionError.
    """
    if settings.contract.arithmetic != "exact":
        return
    check_exact(k)
    if bias is not None:
        raise OptionError("bias", limit="none under exact: int32 is the product alone", value="a bias", nearest=None)


def _check_exact(alpha: float, beta: float, accumulate: bool, out_dtype: DType | None) -> None:
    limit = "the product alone under exact: alpha=1, beta=0, accumulate=False"
    if alpha != 1 or beta != 0 or accumulate:
        value = f"alpha={alpha}, beta={beta}, accumulate={accumulate}"
        raise OptionError("epilogue of an int8 product", limit=limit, value=value, nearest="NumPy, on the int32 result")
    if out_dtype is not None and out_dtype != INT32:
        raise DTypeError("out_dtype", limit="int32 under exact", value=out_dtype.name, nearest="int32")


def check_operand(name: str, x: Array, also: DType | None = None) -> None:
    """Raise unless `x` has a supported dtype, or `also`, and every element lies at a multiple of its alignment."""
    if also is None or x.dtype != also:
        check_dtype(name, x.dtype)
    if not x.flags.aligned:
        raise LayoutError(
            f"memory of {name}", limit="aligned elements", value="unaligned", nearest=f"np.require({name}, None, 'A')"
        )


def _check_c(c: Array, shape: tuple[int, ...], dtype: DType, settings: Settings) -> None:
    check_operand("c", c)
    if c.shape != shape:
        raise ShapeError("shape of c", limit="that of the product", value=list(c.shape), nearest=list(shape))
    legal = (FLOAT32,) if settings.accumulate else (FLOAT32, dtype)
    if c.dtype not in legal:
        limit = "float32 with accumulate=True" if settings.accumulate else "the output dtype, or float32"
        raise DTypeError("dtype of c", limit=limit, value=c.dtype.name, nearest=legal[-1].name)


def check_bias(bias: Array, n: int) -> None:
    """Raise unless `bias` is [n] and of a supported dtype."""
    check_operand("bias", bias)
    if bias.shape != (n,):
        raise ShapeError("shape of bias", limit="one value a column", value=list(bias.shape), nearest=[n])


def check_out(
    out: Array,
    shape: tuple[int, ...],
    dtype: DType,
    reads: Sequence[tuple[str, Array | None]],
    c: Array | None = None,
    *,
    name: str = "out",
) -> None:
    """Raise unless `out` is writable, has that shape and dtype, and overlaps neither itself nor what is read.

    C may be `out` itself: the same elements at the same places.
    """
    if out.shape != shape:
        raise ShapeError(f"shape of {name}", limit="that of the product", value=list(out.shape), nearest=list(shape))
    check_operand(name, out, INT32)
    if out.dtype != dtype:
        raise DTypeError(f"dtype of {name}", limit="that of the result", value=out.dtype.name, nearest=dtype.name)
    if not out.flags.writeable:
        nearest = "a writable array" + ", or out=None" * (name == "out")
        raise LayoutError(name, limit="writable memory", value="read-only", nearest=nearest)
    check_no_self_overlap(name, out)
    for other, x in reads:
        if x is not None:
            check_apart(other, x, out, out_name=name)
    if c is not None and not same_elements(c, out):
        check_apart("c", c, out, out_name=name)


def transposed(name: str, x: Array, op: object) -> Array:
    """op(x) for op as in `stored`."""
    return x if stored(name, op) == "N" else x.swapaxes(-1, -2)


def stored(name: str, op: object) -> str:
    """N or T for op in N, T, C, upper or lower case; C is T for real types. Raises OptionError: another letter."""
    found = op.upper() if isinstance(op, str) else ""
    if found not in ("N", "T", "C"):
        raise OptionError(name, limit="'N', 'T' or 'C'", value=repr(op), nearest="'T'" if op is True else "'N'")
    return "N" if found == "N" else "T"


def _scalar(name: str, value: Any) -> float:
    if type(value) is float and value in (0.0, 1.0):
        return 1.0 if value == 1.0 else math.copysign(0.0, value)  # no subnormal that passes for 0
    try:
        if isinstance(value, str | bytes | bytearray | complex | np.complexfloating):
            raise TypeError
        exact = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: of torch's
        raise OptionError(name, limit="a finite real number", value=repr(value), nearest=1.0) from error
    rounded = nearest_float32(exact)
    if not math.isfinite(rounded):
        nearest = math.copysign(float(np.finfo(np.float32).max), exact) if exact == exact else 1.0
        raise OptionError(name, limit="finite in float32", value=value, nearest=nearest)
    return rounded


def _nearest_contract(a: DType, b: DType, names: tuple[str, ...]) -> str:
    if a == b == INT8:
        return "contract='exact/chain', or None"
    if not names:
        return "isogemm.linear with a QuantizedMatrix, or contract='fma/chain'"
    if INT8.name in names:
        return "contract='fma/chain', or int8 operands"
    return "contract='tf32:sm90/chain'" if a == b == FLOAT32 and FLOAT32.name not in names else f"{names[0]} operands"
