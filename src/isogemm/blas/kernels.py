"""Names of kernels, read and written: ``gemm_nt_q5_0_q8_0`` and others of the convention that C engines have.

A name is the operation, then how operands lie (``nt``: weights stored [n, k]), the direction of a training step
(``fwd``, ``backward``), the loop (``blocked_serial``), the type of the weights, and that of the activations where it is
another one than float32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..api.plan import plan
from ..base.arguments import of_type
from ..base.dtypes import PTX, SHORT_NAMES
from ..errors import OptionError
from ..formats.blocks import FORMATS

LOOPS = {
    "naive": "three plain loops",
    "blocked": "cut into blocks that stay in a cache",
    "tiled": "cut into blocks that stay in a cache",
    "serial": "on one thread",
    "parallel": "on several threads",
}
LEAVES = "fma/leaf4096"  # the order in which isogemm.torch sums gradients of weights
PASSES = {"fwd": "fwd", "forward": "fwd", "bwd": "backward", "backward": "backward"}
_TURNED = f"trans_a='T', contract={LEAVES!r}"
_BLOCKS = {name.lower(): name for name, fmt in FORMATS.items() if fmt.block > 1}
_TYPE = "|".join(sorted(map(re.escape, (*SHORT_NAMES, *_BLOCKS)), key=len, reverse=True))
_NAME = re.compile(
    rf"gem(?P<op>[mv])(?:_(?P<layout>[nt]{{2}}))?(?:_(?P<direction>{'|'.join(PASSES)}))?"
    rf"(?P<loops>(?:_(?:{'|'.join(LOOPS)}))*)_(?P<weights>{_TYPE})(?:_(?P<activations>{_TYPE}))?"
)


@dataclass(frozen=True, slots=True)
class KernelProduct:
    """One product of a kernel.

    Attributes
    ----------
    formula : str
    call : str
        The call here that computes it.
    trans : str
        Letters of its operands.
    extents : str
        m, n and k of the product in those of the layer, for example ``mkn`` for dx.
    contract : str
    """

    formula: str
    call: str
    trans: str
    extents: str
    contract: str


@dataclass(frozen=True, slots=True)
class KernelName:
    """What a name says.

    Attributes
    ----------
    op : {"gemm", "gemv"}
    layout : str
        ``nt`` and the like; empty where the name has none, which means ``nt``.
    direction : {"", "fwd", "backward"}
    loops : tuple of str
        Keys of `LOOPS`.
    weights, activations : str
        A short float type or a block format, in small letters; `activations` is empty for float32, or as `weights`.
    """

    op: str
    layout: str
    direction: str
    loops: tuple[str, ...]
    weights: str
    activations: str

    def __str__(self) -> str:
        parts = (self.op, self.layout, self.direction, *self.loops, self.weights, self.activations)
        return "_".join(filter(None, parts))

    @property
    def quantized(self) -> bool:
        """Whether the weights are blocks."""
        return self.weights in _BLOCKS

    @property
    def dtype(self) -> str:
        """Element type of the product's operands as floats: the weights', float32 for blocks."""
        return "float32" if self.quantized else SHORT_NAMES[self.weights]

    def products(self) -> tuple[KernelProduct, ...]:
        """What it computes, product by product, and the calls that do so here."""
        if self.quantized:
            fmt, integers = _BLOCKS[self.weights], bool(self.activations)
            how = "q8" if integers else "fp32"
            call = f"isogemm.linear(x, isogemm.quantize(w, {fmt!r}), activations={how!r})"
            return (KernelProduct("y = x @ w.T", call, "NT", "mnk", "int32/chain" if integers else "fma/chain"),)
        if self.direction == "backward":
            return (
                KernelProduct("dx = dy @ w", "isogemm.gemm(dy, w)", "NN", "mkn", "fma/chain"),
                KernelProduct("dw = dy.T @ x", f"isogemm.gemm(dy, x, {_TURNED})", "TN", "nkm", LEAVES),
            )
        letters = self.layout.upper() or "NT"
        name = {"NT": "y = x @ w.T", "NN": "y = x @ w", "TN": "y = x.T @ w", "TT": "y = x.T @ w.T"}[letters]
        ops = [f", trans_{x}='T'" for x, letter in zip("ab", letters, strict=True) if letter == "T"]
        call = "isogemm.linear(x, w, bias)" if letters == "NT" else f"isogemm.gemm(x, w{''.join(ops)})"
        return (KernelProduct(name, call, letters, "mnk", "fma/chain"),)

    def plans(self, m: int, n: int, k: int) -> tuple[Any, ...]:
        """The plan of each product on this CPU, for x [m, k] and w [n, k].

        Blocks that meet integers have none: their kernel is the format's own, whatever the shape.
        """
        if self.quantized and self.activations:
            return ()
        return tuple(self._plan(product, {"m": m, "n": n, "k": k}) for product in self.products())

    def _plan(self, product: KernelProduct, sizes: dict[str, int]) -> Any:
        m, n, k = (sizes[letter] for letter in product.extents)
        threads = 1 if "serial" in self.loops else None
        return plan(
            m, n, k, dtype=self.dtype, trans_a=product.trans[0], trans_b=product.trans[1], contract=product.contract,
            threads=threads,
        )  # fmt: skip

    def meaning(self) -> str:
        """The name in words, and what serves it, a line each."""
        letters = self.layout.upper() or "NT"
        stored = {"N": "x [m, k]", "T": "x [k, m]"}[letters[0]], {"N": "w [k, n]", "T": "w [n, k]"}[letters[1]]
        what = {"gemm": "matrix by matrix", "gemv": "matrix by vector: m is 1"}[self.op]
        lines = [f"{self}: {what}, {' and '.join(stored)}, each stored by rows"]
        if self.direction:
            step = "gradients of a linear layer" if self.direction == "backward" else "a linear layer"
            lines.append(f"of a training step: {step}")
        lines += [f"{word}: {LOOPS[word]}" for word in self.loops]
        lines.append(f"weights {self._type(self.weights)}, activations {self._type(self.activations or self._like())}")
        for product in self.products():
            lines.append(f"{product.formula}, here {product.call}, contract {product.contract}")
        if self.direction == "backward":
            lines.append("db = the sum of dy over its rows, here isogemm.torch.linear's gradient")
        return "\n".join(lines)

    def _like(self) -> str:
        return PTX["float32"] if self.quantized else self.weights

    @staticmethod
    def _type(name: str) -> str:
        if name not in _BLOCKS:
            return SHORT_NAMES[name]
        fmt = FORMATS[_BLOCKS[name]]
        return f"{fmt.name} (blocks of {fmt.block} in {fmt.nbytes} bytes)"


def parse_kernel(name: str) -> KernelName:
    """Read the name of a kernel; ``str()`` of what is returned writes it again.

    Parameters
    ----------
    name : str
        For example ``gemm_nt_q5_0_q8_0``, ``gemm_blocked_serial_bf16`` or ``gemm_backward_f32``.

    Raises
    ------
    OptionError
        It is no such name, or a format's weights do not meet activations of that kind.

    Examples
    --------
    >>> parse_kernel("gemm_nt_q4_k").products()[0].call
    "isogemm.linear(x, isogemm.quantize(w, 'Q4_K'), activations='fp32')"
    """
    of_type("name", name, str, "the name of a kernel", "'gemm_nt_q4_k'")
    match = _NAME.fullmatch(name.lower())
    if match is None:
        limit = "gemm or gemv, then layout, fwd or backward, loop, weights, activations"
        raise OptionError("name of a kernel", limit=limit, value=repr(name), nearest="gemm_nt_q4_k_q8_k")
    weights, activations = match["weights"], match["activations"] or ""
    found = KernelName(
        f"gem{match['op']}", match["layout"] or "", PASSES.get(match["direction"] or "", ""),
        tuple(filter(None, match["loops"].split("_"))), _short(weights), _unsaid(_short(weights), _short(activations)),
    )  # fmt: skip
    _check(found)
    return found


def _short(name: str) -> str:
    """One spelling of a type: f32 for fp32."""
    return PTX[SHORT_NAMES[name]] if name in SHORT_NAMES else name


def _unsaid(weights: str, activations: str) -> str:
    """Activations as a name has them: empty where they are what they would be without a word."""
    return "" if activations == (PTX["float32"] if weights in _BLOCKS else weights) else activations


def _check(name: KernelName) -> None:
    """Refuse types that do not meet in one kernel, and directions and layouts that quantized weights do not have."""
    legal, stem = "", "_".join(filter(None, (name.op, name.layout, name.direction, *name.loops)))
    if name.quantized:
        partner = FORMATS[_BLOCKS[name.weights]].activations.lower()
        if name.activations not in ("", partner):
            legal = "_".join(filter(None, (stem, name.weights, partner)))
        if name.layout not in ("", "nt") or name.direction == "backward":
            legal = "_".join(filter(None, (f"{name.op}_nt", name.weights, name.activations)))
    elif name.activations:
        legal = f"{stem}_{name.weights}"
    if legal:
        limit = "blocks are [n, k], and meet float32 or the activations of their format; floats meet their own kind"
        raise OptionError("types of a kernel", limit=limit, value=str(name), nearest=legal)
