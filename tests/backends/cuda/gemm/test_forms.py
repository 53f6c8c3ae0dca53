"""Loop, list, array of pointers, strided stack and group: one set of bits, whatever the form."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.cuda.device import MODES, Guarded, Mode, draw, expected, laid, modes, same, torch

import isogemm

pytestmark = pytest.mark.gpu


def items(mode: Mode, count: int, m: int, n: int, k: int) -> tuple[Any, Any]:
    return draw((count, m, k), mode.dtype, m, special=True), draw((count, k, n), mode.dtype, n)


@modes
@pytest.mark.parametrize("size", [(1, 64, 128), (17, 72, 96), (100, 77, 65), (128, 128, 256)], ids=str)
def test_forms_agree(size: tuple[int, int, int], mode: Mode) -> None:
    a, b = items(mode, 6, *size)
    want = torch.stack([expected(x, y, mode.definition) for x, y in zip(a, b, strict=True)])
    o = mode.options
    forms = {
        "loop": [isogemm.matmul(x, y, **o) for x, y in zip(a, b, strict=True)],
        "gemm": [isogemm.gemm(x, y, **o) for x, y in zip(a, b, strict=True)],
        "stack": isogemm.matmul(a, b, **o),
        "strided": isogemm.gemm_strided_batched(a, b, **o),
        "list": isogemm.gemm_batched(list(a), list(b), **o),
        "array": isogemm.gemm_batched(a, b, **o),
        "grouped": isogemm.gemm_grouped(list(a), list(b), **o),
    }
    for name, got in forms.items():
        same(torch.stack(list(got)), want, f"{mode} {name}")


@modes
def test_strides_of_zero(mode: Mode) -> None:
    """One matrix for all items, on either side, and a batch that shares its weights as one wide product."""
    a, b = items(mode, 5, 33, 40, 72)
    left, right = a[:1].expand(5, -1, -1), b[:1].expand(5, -1, -1)
    for x, y in ((left, b), (a, right), (left, right)):
        want = torch.stack([expected(p, q, mode.definition) for p, q in zip(x, y, strict=True)])
        same(isogemm.gemm_strided_batched(x, y, **mode.options), want)
        same(isogemm.matmul(x, y, **mode.options), want)


@modes
def test_lists_of_matrices_that_lie_anywhere(mode: Mode) -> None:
    """Separate allocations, other strides in every item, the same matrix more than once."""
    a, b = items(mode, 6, 19, 40, 104)
    layouts = ("rows", "columns", "padded", "offset", "stepped", "padded columns")
    left = [laid(x, layout) for x, layout in zip(a, layouts, strict=True)]
    right = [laid(b[0], layout) for layout in layouts]
    right[3] = right[0]
    for form in (isogemm.gemm_batched, isogemm.gemm_grouped):
        got = form(left, right, **mode.options)
        for x, y in zip(got, a, strict=True):
            same(x, expected(y, b[0], mode.definition), f"{mode} {form.__name__}")


RAGGED = [(5, 33, 64), (0, 33, 64), (17, 1, 64), (130, 64, 333), (1, 200, 16), (3, 0, 8), (64, 64, 0), (257, 65, 128)]


@modes
def test_groups_of_any_sizes(mode: Mode) -> None:
    """Ragged groups, groups of nothing, groups over nothing."""
    a = [draw((m, k), mode.dtype, m + 1, special=True) for m, _, k in RAGGED]
    b = [draw((k, n), mode.dtype, n + 2) for _, n, k in RAGGED]
    got = isogemm.gemm_grouped(a, b, **mode.options)
    for x, y, z in zip(a, b, got, strict=True):
        same(z, expected(x, y, mode.definition), f"{mode} {tuple(x.shape)} @ {tuple(y.shape)}")
    assert isogemm.gemm_grouped([], [], **mode.options) == []


@modes
@pytest.mark.parametrize("epilogue", ["beta", "accumulate", "bias"])
def test_epilogues_of_lists_and_groups(epilogue: str, mode: Mode) -> None:
    sizes = [(m, 48, k) for m, _, k in RAGGED if k]
    a = [draw((m, k), mode.dtype, m + 1) for m, _, k in sizes]
    b = [draw((k, n), mode.dtype, k + 2) for _, n, k in sizes]
    c = [draw((m, n), "float32", m) for m, n, _ in sizes]
    bias = draw((48,), "float32", 9) if epilogue == "bias" else None
    options: dict[str, Any] = {"beta": {"beta": 0.7, "alpha": 1.3}, "accumulate": {"accumulate": True}}.get(
        epilogue, {}
    )
    got = isogemm.gemm_grouped(
        a, b, None if bias is not None else c, bias=bias, out_dtype=torch.float32, **options, **mode.options
    )
    accumulate = options.pop("accumulate", False)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        start = {} if bias is not None else {"c": z} if accumulate else {"added": z}
        want = expected(x, y, mode.definition, **start, **options, bias=bias, out_dtype="float32")
        same(result, want, f"{mode} {epilogue}")


@modes
def test_given_outputs_and_their_surroundings(mode: Mode) -> None:
    """Stacks, lists and groups write their outputs and nothing beside them."""
    a, b = items(mode, 4, 33, 40, 72)
    want = torch.stack([expected(x, y, mode.definition) for x, y in zip(a, b, strict=True)])
    for layout in ("rows", "columns", "stepped"):
        out = Guarded(want.shape, mode.dtype, layout)
        isogemm.gemm_strided_batched(a, b, out=out.view, **mode.options)
        out.check(want, f"{mode} {layout}")
        for form in (isogemm.gemm_batched, isogemm.gemm_grouped):
            out = Guarded(want.shape, mode.dtype, layout)
            form(list(a), list(b), out=list(out.view), **mode.options)
            out.check(want, f"{mode} {layout} {form.__name__}")


@modes
def test_arrays_of_pointers(mode: Mode) -> None:
    """Real addresses on the device: of separate allocations, of padded ones, the same one twice; results included."""
    a, b = items(mode, 5, 33, 40, 72)
    want = torch.stack([expected(x, y, mode.definition) for x, y in zip(a, b, strict=True)])
    for layout in ("rows", "columns", "padded", "offset"):
        left, right = [laid(x, layout) for x in a], [laid(y, layout) for y in b]
        pa, pb = isogemm.PointerArray.of(left), isogemm.PointerArray.of(right)
        out = Guarded(want.shape, mode.dtype, "rows")
        isogemm.gemm_batched(pa, pb, out=list(out.view), **mode.options)
        out.check(want, f"{mode} {layout}")
        out = Guarded(want.shape, mode.dtype, "offset")
        isogemm.gemm_batched(pa, pb, out=isogemm.PointerArray.of(list(out.view)), **mode.options)
        out.check(want, f"{mode} {layout}, results by pointers")
    shared = torch.tensor([b[2].data_ptr()] * 5, device="cuda")
    pb = isogemm.PointerArray(shared, (72, 40), mode.dtype)
    out = Guarded(want.shape, mode.dtype)
    isogemm.gemm_batched(isogemm.PointerArray.of(list(a)), pb, out=list(out.view), **mode.options)
    out.check(torch.stack([expected(x, b[2], mode.definition) for x in a]), f"{mode} one weight")


@modes
def test_heads_of_attention(mode: Mode) -> None:
    """Q K^T and P V over heads, as strided views of one projection, decode and prefill."""
    heads, width = 8, 128
    for tokens, keys in ((1, 300), (17, 300), (256, 256)):
        q, k, v = (draw((n, heads, width), mode.dtype, n + i) for i, n in enumerate((tokens, keys, keys)))
        scores = isogemm.matmul(q.transpose(0, 1), k.permute(1, 2, 0), **mode.options)
        back = isogemm.matmul(scores, v.transpose(0, 1), **mode.options)
        for h in (0, heads - 1):
            same(scores[h], expected(q[:, h], k[:, h].T, mode.definition), f"{mode} scores")
            same(back[h], expected(scores[h], v[:, h], mode.definition), f"{mode} values")


def test_many_items_and_wide_batches() -> None:
    """More items than a grid's third axis has room for, and more than a kernel's list."""
    mode = MODES[0]
    a, b = draw((70000, 1, 16), mode.dtype, 1), draw((70000, 16, 8), mode.dtype, 2)
    got = isogemm.matmul(a, b, **mode.options)
    for i in (0, 1, 65534, 65535, 65536, 69999):
        same(got[i], expected(a[i], b[i], mode.definition), i)
    some = list(range(0, 70000, 35))
    listed = isogemm.gemm_batched([a[i] for i in some], [b[i] for i in some])
    same(torch.stack(listed), got[some])
