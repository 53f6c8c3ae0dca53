"""The numeric part of a plan: everything that can reach the bits, and nothing that can see M; and plans around it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..contract.spec import Contract, ContractLike, Order, as_contract
from ..errors import ContractError, IsogemmError, OptionError
from .settings import check_pair

if TYPE_CHECKING:
    from .product import Product, Strides

USUAL = "16 to 64"
"""Rows at which texts on these kernels put the crossover from matrix by vector to tiles."""
FEW, WIDE = 16, 32000  # rows up to which they speak of a batched gemv; columns of a vocabulary


def word(m: int, n: int) -> str:
    """The field's word for a product of such an extent, whatever computes it."""
    if m == 1:
        return "wide gemv" if n >= WIDE else "gemv"
    return "batched gemv" if m <= FEW else "tiled gemm"


@dataclass(frozen=True, slots=True)
class NumericPlan:
    """What the numbers are: one output element is a function of this and of its row and column alone."""

    contract: Contract
    k: int  # length of the sum
    # dtype_a, dtype_b, out_dtype: operand and output element types
    dtype_a: str
    dtype_b: str
    out_dtype: str
    leaves: int  # chains from zero that the order cuts K into


@dataclass(frozen=True, slots=True)
class AnyPlan:
    """A frozen, printable plan for one product."""

    # m, n, k: C[m, n] = op(A)[m, k] @ op(B)[k, n]
    m: int
    n: int
    k: int
    # trans_a, trans_b: {"N", "T"}: how the operands are stored
    trans_a: str
    trans_b: str
    numeric: NumericPlan  # what the numbers are; made without M

    @property
    def contract(self) -> Contract:
        """The definition of the bits."""
        return self.numeric.contract

    @property
    def digest(self) -> str:
        """Hash over everything in the plan."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"numeric": asdict(self.numeric) | {"contract": str(self.contract)}}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (name, value) lines, the table that `str` prints."""
        return self.heading()

    def heading(self, batch: int = 1, note: str = "m plays no part") -> list[tuple[str, str]]:
        """The lines that say what is computed."""
        x, items = self.numeric, f", batch {batch}" if batch > 1 else ""
        return [
            ("product", f"C[{self.m}, {self.n}] = op{self.trans_a}(A) @ op{self.trans_b}(B), k = {self.k}{items}"),
            ("contract", f"{x.contract}  ({x.leaves} chain{'s' if x.leaves != 1 else ''} over K; {note})"),
            ("types", f"{x.dtype_a} x {x.dtype_b} -> {x.out_dtype}"),
        ]

    def _title(self) -> str:
        return f"plan {self.m} x {self.n} x {self.k}"

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {value}" for name, value in self.rows())

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title(), show_header=False)
        for name, value in self.rows():
            table.add_row(name, Text(value))  # as it is: a configuration in brackets is no markup
        return table


def plan_data(text: str) -> Any:
    """The data in a plan's JSON.

    Raises OptionError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        limit, nearest = "JSON of a plan", "what to_json() gave"
        raise OptionError("plan", limit=limit, value=str(error), nearest=nearest) from error


@contextmanager
def reading(data: Any, schema: str) -> Iterator[None]:
    """Read a plan's data.

    Raises OptionError: it is not of this schema, or a part of it is missing or not what it can be.
    """
    given, nearest = data.get("schema") if isinstance(data, Mapping) else None, "isogemm.plan(...)"
    if given != schema:
        raise OptionError("plan", limit=f"schema {schema}", value=given, nearest=nearest)
    try:
        yield
    except IsogemmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise OptionError("plan", limit="what to_dict() gave", value=repr(error), nearest=nearest) from error


@dataclass(frozen=True, slots=True)
class NumericKey:
    """What a tuning table is looked up by: a product without M. The schedule then looks M up in the row found."""

    contract: str
    types: str  # ``bfloat16*bfloat16>bfloat16``: operands and output
    layout: str  # ``NT>N``: letters of A, B and out; N rows contiguous, T columns contiguous, S neither
    epilogue: str  # {"plain", "epilogue", "accumulate"}: the product alone; with alpha, C or bias; or starting from C
    n: int
    k: int
    batch: int = 1  # items of a strided batch

    @property
    def arithmetic(self) -> str:
        """The contract's arithmetic."""
        return self.contract.partition("/")[0]

    def __str__(self) -> str:
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.contract} {self.types} {self.layout} {self.epilogue} n {self.n} k {self.k}{batch}"


def default_contract(device: str = "cpu", dtype: str = "float32", arithmetic: str = "tensor_core:sm90") -> Contract:
    """The contract used when none is asked for: ``fma/chain`` on a CPU and for float32, ``exact/chain`` for its int8.

    On ``cuda``, 16-bit operands get `arithmetic`, that of the device's own tensor cores, and the chain.
    """
    if device == "cpu" and dtype == "int8":
        return Contract("exact")
    return Contract(arithmetic) if device == "cuda" and dtype in ("bfloat16", "float16") else Contract()


def numeric_plan(
    k: int,
    *,
    dtype_a: str,
    dtype_b: str,
    out_dtype: str,
    contract: ContractLike | None = None,
    device: str = "cpu",
    arithmetic: str = "tensor_core:sm90",
) -> NumericPlan:
    """Fix the numbers, in which M has no part; a ContractError where the contract has none for these operand types."""
    default = dtype_a if dtype_a == dtype_b else "float32"  # operands of two types are widened
    chosen = default_contract(device, default, arithmetic) if contract is None else as_contract(contract)
    for name in (dtype_a, dtype_b):
        if name not in chosen.operands:
            raise ContractError(
                f"operand type for {chosen}",
                limit=", ".join(chosen.operands) or "a quantized weight",
                value=name,
                nearest=chosen.operands[0] if chosen.operands else "contract fma/chain",
            )
    check_pair(dtype_a, dtype_b, chosen)
    return NumericPlan(chosen, k, dtype_a, dtype_b, out_dtype, len(chosen.order.leaves(k, chosen.block)))


def integer_contract(contract: ContractLike | None) -> Contract:
    """``int32/chain``, the only one that plans of quantized weights have: any other is an OptionError."""
    only = Contract("int32", Order())
    if contract is not None and as_contract(contract) != only:
        raise OptionError("contract of a plan with a format", limit=only, value=contract, nearest=only)
    return only


def letter(x: Strides) -> str:
    """N where rows are contiguous, T where columns are, S where neither is. Extents are not looked at: M is one."""
    return "N" if x.col == 1 else "T" if x.row == 1 else "S"


def numeric_key(product: Product) -> NumericKey:
    """`product` without its M."""
    epilogue = "accumulate" if product.accumulate else "plain" if product.plain else "epilogue"
    return NumericKey(
        str(product.contract),
        f"{product.dtype_a}*{product.dtype_b}>{product.dtype_out}",
        f"{letter(product.a)}{letter(product.b)}>{letter(product.out)}",
        epilogue,
        product.n,
        product.k,
        product.batch,
    )


def is_packed(product: Product) -> bool:
    """Whether every matrix of a product fills its memory without gaps, and items of a batch follow each other."""
    p = product
    matrices = [(p.a, p.m, p.k), (p.b, p.k, p.n), (p.out, p.m, p.n)] + ([(p.c, p.m, p.n)] if p.c is not None else [])
    return all(
        ((x.col == 1 and x.row == columns) or (x.row == 1 and x.col == rows))
        and (p.batch == 1 or x.batch == rows * columns)
        for x, rows, columns in matrices
    )
