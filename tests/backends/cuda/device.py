"""Operands on the GPU, what their products have to be, and comparisons of bits where the results lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from isogemm.contract import compare, reference
from isogemm.contract.spec import Contract

torch = pytest.importorskip("torch")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {value: key for key, value in DTYPES.items()}
WORDS = {2: torch.int16, 4: torch.int32}
CANARY = {2: 0x7FBE, 4: 0x7FC0BEEF}  # NaNs that no product returns


@dataclass(frozen=True)
class Mode:
    """An operand type and a contract: what a user chooses, and what decides the bits.

    Attributes
    ----------
    name, dtype : str
    asked : str or None
        The contract as given to a call; None for the device's default.
    definition : str
        The contract whose bits the result has to have.
    """

    name: str
    dtype: str
    asked: str | None
    definition: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a call."""
        return {} if self.asked is None else {"contract": self.asked}

    @property
    def contract(self) -> Contract:
        """`definition`, parsed."""
        return Contract.parse(self.definition)

    def ordered(self, order: str) -> Mode:
        """The same arithmetic in another order, asked for."""
        text = f"{self.contract.arithmetic}/{order}"
        return Mode(self.name, self.dtype, text, text)

    def __str__(self) -> str:
        return self.name


BF16 = Mode("bf16", "bfloat16", None, "tensor_core:sm90/chain")
FP16 = Mode("fp16", "float16", None, "tensor_core:sm90/chain")
IEEE = Mode("ieee", "float32", None, "fma/chain")
TF32X3 = Mode("tf32x3", "float32", "tf32x3:sm90/chain", "tf32x3:sm90/chain")
TF32 = Mode("tf32", "float32", "tf32:sm90/chain", "tf32:sm90/chain")
MODES = (BF16, FP16, IEEE, TF32X3)
ALL_MODES = (*MODES, TF32)
modes = pytest.mark.parametrize("mode", MODES, ids=str)
all_modes = pytest.mark.parametrize("mode", ALL_MODES, ids=str)


def draw(shape: Sequence[int], dtype: str, seed: int, special: bool = False) -> Any:
    """Normal values on the GPU; with `special` a few infinities, NaNs, signed zeros, subnormals and large numbers.

    At most about one row in three gets a special value and a matrix's first row gets none, so that numbers stay the
    rule in the products, those of a single row included.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, device="cuda")
    if special:
        odd = torch.tensor([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -6e-8, 3e4], device="cuda")
        hit = torch.rand(x.shape, generator=generator, device="cuda") < 0.4 / max(1, x.shape[-1])
        if x.ndim > 1:
            hit[..., :1, :] = False
        pick = torch.randint(0, len(odd), x.shape, generator=generator, device="cuda")
        x = torch.where(hit, odd[pick], x)
    return x.to(DTYPES[dtype])


def upload(x: np.ndarray) -> Any:
    """A copy on the GPU, bits and dtype kept."""
    word = {2: np.int16, 4: np.int32}[x.itemsize]
    return torch.from_numpy(np.array(x, order="C").view(word)).cuda().view(DTYPES[x.dtype.name])


def download(x: Any) -> np.ndarray:
    """A copy on the host, bits and dtype kept."""
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(NAMES[x.dtype], NAMES[x.dtype])
    return x.detach().contiguous().view(WORDS[x.element_size()]).cpu().numpy().view(dtype)


def differing(got: Any, want: Any) -> int:
    """Elements whose bits differ, counted on the GPU; shape and dtype have to agree."""
    assert got.shape == want.shape, (tuple(got.shape), tuple(want.shape))
    assert got.dtype == want.dtype
    word = WORDS[got.element_size()]
    return int((got.contiguous().view(word) != want.contiguous().view(word)).sum())


def same(got: Any, want: Any, what: object = "") -> None:
    """Equal bits, everywhere; the failure names the first mismatch."""
    if isinstance(want, np.ndarray):
        want = upload(want)
    count = differing(got, want)
    if count:
        first = compare.first_mismatch(download(got), download(want))
        pytest.fail(f"{what}: {count} of {got.numel()} differ, first {first}")


def rounded(x: Any, dtype: str) -> Any:
    """float32 results rounded once to `dtype`, with the one NaN that products have."""
    y = x.to(DTYPES[dtype])
    nan = 0x7FFF if y.element_size() == 2 else 0x7FFFFFFF
    return y.contiguous().view(WORDS[y.element_size()]).masked_fill(torch.isnan(x), nan).view(y.dtype)


def expected(a: Any, b: Any, definition: str, *, c: Any = None, out_dtype: str | None = None, **epilogue: Any) -> Any:
    """The product by the executable definition, as a tensor.

    `c` is what the walk over K starts from, `added` what beta scales; alpha, beta and bias are the epilogue's.
    """
    start = None if c is None else download(c)
    acc = reference.evaluate(download(a), download(b), definition, start)
    for name, given in (("c", epilogue.pop("added", None)), ("bias", epilogue.pop("bias", None))):
        if given is not None:
            epilogue[name] = download(given)
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(out_dtype or NAMES[a.dtype], out_dtype or NAMES[a.dtype])
    return upload(reference.epilogue(acc, out_dtype=dtype, **epilogue))


@cache
def spread(size: int, count: int) -> tuple[int, ...]:
    """Both ends and an even spread between."""
    return tuple(np.unique(np.linspace(0, size - 1, min(size, count)).astype(int)).tolist())


def check_sample(got: Any, a: Any, b: Any, mode: Mode, rows: int = 12, columns: int = 48, c: Any = None) -> None:
    """Sampled rows and columns of a @ b against the definition: an element needs its own row and column alone."""
    i, j = list(spread(a.shape[0], rows)), list(spread(b.shape[1], columns))
    start = None if c is None else c[i][:, j]
    want = expected(a[i], b[:, j], mode.definition, c=start, out_dtype=NAMES[got.dtype])
    same(got[i][:, j], want, f"{mode}, sample of {tuple(a.shape)} @ {tuple(b.shape)}")


LAYOUTS = ("rows", "columns", "padded", "offset", "stepped", "padded columns")


def laid(x: Any, layout: str) -> Any:
    """The values of a matrix (or of a stack) as a view of that layout; what lies between them are canaries.

    ``rows`` and ``columns`` are dense; ``padded`` has a longer leading dimension; ``offset`` starts one element after
    an allocation and has an odd leading dimension; ``stepped`` takes every other element of every other row.
    """
    if layout in ("columns", "padded columns"):
        turned = laid(x.transpose(-1, -2), "padded" if layout == "padded columns" else "rows")
        return turned.transpose(-1, -2)
    *lead, rows, columns = x.shape
    if layout == "rows":
        return x.contiguous().clone()
    room, at = {
        "padded": ((rows, columns + 24), np.s_[..., :, :columns]),
        "offset": ((rows + 1, columns + 3 - columns % 2), np.s_[..., :rows, 1 : columns + 1]),
        "stepped": ((2 * rows, 2 * columns + 2), np.s_[..., : 2 * rows : 2, : 2 * columns : 2]),
    }[layout]
    whole = torch.empty((*lead, *room), dtype=WORDS[x.element_size()], device="cuda").fill_(CANARY[x.element_size()])
    view = whole.view(x.dtype)[at]
    view.copy_(x)
    return view


class Guarded:
    """An output of NaNs that no product returns, in the middle of more of them."""

    def __init__(self, shape: Sequence[int], dtype: str, layout: str = "rows") -> None:
        *lead, rows, columns = shape
        turned = layout == "columns"
        if turned:
            rows, columns = columns, rows
        step, margin = (2 if layout == "stepped" else 1), (1 if layout == "offset" else 128)
        size = 2 if dtype != "float32" else 4
        self.canary = CANARY[size]
        self.room = torch.full(
            (*lead, rows + 2, 2 * margin + columns * step), self.canary, dtype=WORDS[size], device="cuda"
        )
        self.inside = np.s_[..., 1 : rows + 1, margin : margin + columns * step : step]
        view = self.room.view(DTYPES[dtype])[self.inside]
        self.view = view.transpose(-1, -2) if turned else view

    def check(self, want: Any, what: object = "") -> None:
        """The output has these bits, and nothing around it was written."""
        same(self.view, want, what)
        around = self.room.clone()
        around[self.inside] = self.canary
        written = int((around != self.canary).sum())
        assert not written, f"{what}: {written} words around the output were written"
