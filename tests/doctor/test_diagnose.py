"""Mistakes of every kind in results, made here by hand, without the code that explains them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from isogemm import quantize
from isogemm.doctor import MISTAKES, Cause, Diagnosis, diagnose, examine
from isogemm.errors import ContractError, DeviceError, DTypeError, LayoutError, LimitError, OptionError, ShapeError

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(7)


def drawn(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


A, B, BIAS = drawn(37, 53), drawn(53, 41), drawn(41)
HEADS, KEYS = drawn(6, 17, 29), drawn(3, 29, 23)


def as_tf32(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32)


def names(found) -> set[str]:
    return {found.causes[0].name, *found.causes[0].indistinguishable_from} if found.causes else set()


def stale(x: np.ndarray, rows: int) -> np.ndarray:
    out = np.full_like(x, np.nan)
    out[:rows] = x[:rows]
    return out


RESULTS = {
    "k-tail": lambda: (A[:, :48] @ B[:48], {}),
    "m-tail": lambda: (stale(A @ B, 32), {}),
    "n-tail": lambda: (stale((A @ B).T, 40).T, {}),
    "row-column-major": lambda: ((A @ B).T.reshape(37, 41), {}),
    "tf32-rounding": lambda: (
        (A.view(np.uint32) + 0x1000 & 0xFFFFE000).view("f4") @ (B.view(np.uint32) + 0x1000 & 0xFFFFE000).view("f4"),
        {},
    ),
    "bf16-rounding": lambda: (A.astype(BF16).astype("f4") @ B.astype(BF16).astype("f4"), {}),
    "double-rounding": lambda: ((A @ B).astype(np.float16).astype(np.float32), {}),
    "alpha-type": lambda: (1.875 * (A @ B), {}),
    "beta-garbage": lambda: (A @ B + 3, {"c": np.full((37, 41), 3, np.float32)}),
    "beta-type": lambda: (A @ B + 1.75 * np.ones((37, 41), "f4"), {"c": np.ones((37, 41), np.float32), "beta": 0.5}),
    "k-block-repeated": lambda: (A @ B + A[:, :16] @ B[:16], {}),
    "k-block-missing": lambda: (A @ B - A[:, 16:32] @ B[16:32], {}),
    "bias-axis": lambda: (A @ B + BIAS[:37, None], {"bias": BIAS}),
    "bias-twice": lambda: (A @ B + 2 * BIAS, {"bias": BIAS}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_one_mistake_is_named(name):
    observed, call = RESULTS[name]()
    found = diagnose(observed, A, B, **call)
    assert found.verdict == "wrong"
    assert name in names(found)
    assert found.causes[0].residual <= 1 < found.residual
    assert found.causes[0].mend
    assert name in str(found)


def test_a_right_result_is_right_and_its_order_is_told():
    found = diagnose(A[:, ::-1] @ B[::-1], A, B)
    assert (found.verdict, found.exit_status, found.causes) == ("right", 0, ())
    from isogemm.contract import reference

    parts = [
        reference.evaluate(A[:, s].copy(), B[s].copy(), "fma/chain")
        for s in (slice(0, 18), slice(18, 36), slice(36, 53))
    ]
    assert diagnose(parts[0] + parts[1] + parts[2], A, B).order == "split-K of 3, each part fma/chain"
    assert diagnose(reference.evaluate(A, B, "fma/chain"), A, B).order == "fma/chain"
    a, b = A.astype(BF16), B.astype(BF16)
    assert diagnose(reference.evaluate(a, b, "tensor_core:sm90/chain"), a, b).order == "tensor_core:sm90/chain"


def test_bits_that_every_order_gives_name_none():
    from isogemm.contract import reference

    a, b = A.astype(np.float16), B.astype(np.float16)
    assert diagnose(reference.evaluate(a, b, "fma/chain").astype(np.float16), a, b).order == ""
    whole = np.arange(35, dtype=np.float32).reshape(5, 7)
    assert diagnose(whole @ whole.T, whole, whole.T).order == ""


def test_groups_of_heads():
    tiled = np.stack([HEADS[h] @ KEYS[h % 3] for h in range(6)])
    found = diagnose(tiled, HEADS, KEYS)
    assert found.causes[0].name == "gqa-mapping"
    assert "h % 3" in found.causes[0].parameter
    right = np.stack([HEADS[h] @ KEYS[h // 2] for h in range(6)])
    assert diagnose(right, HEADS, KEYS).verdict == "right"


@pytest.mark.parametrize(
    ("name", "ld", "words"), [("ldb", 53, "ldb is 53, the data say 64"), ("lda", 41, "lda is 41, the data say 48")]
)
def test_leading_dimensions_on_flat_buffers(name, ld, words):
    """Column-major, padded: a 37 x 53 in columns of 48, a 53 x 41 in columns of 64."""
    a, b, c = drawn(48 * 60), drawn(64 * 50), np.zeros(40 * 41, np.float32)
    lds = {"lda": 48, "ldb": 64} | {name: ld}
    for j in range(41):
        for i in range(37):
            k = np.arange(53)
            c[i + 40 * j] = (a[i + lds["lda"] * k].astype("f8") * b[k + lds["ldb"] * j]).sum()
    found = diagnose(c, a, b, m=37, n=41, k=53, lda=48, ldb=64, ldc=40)
    assert (found.causes[0].name, found.causes[0].parameter) == (name, words)


def test_two_mistakes_at_once():
    found = diagnose(1.875 * (A[:, :48] @ B[:48]), A, B)
    assert set(found.causes[0].name.split(" + ")) == {"alpha-type", "k-tail"}


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "Q4_K"])
def test_rows_of_blocks_that_lie_a_block_apart(fmt):
    k = 2 * 256
    w, x = quantize(drawn(33, k), fmt), drawn(5, k)
    assert diagnose(x @ w.dequantize().T, x, w).verdict == "right"
    data = np.concatenate([w.rows.reshape(-1), np.zeros(33 * w.format.nbytes, np.uint8)])
    step = w.strides[0] + w.format.nbytes
    rows = np.stack([data[i * step : i * step + w.strides[0]] for i in range(33)])
    from isogemm.formats import reference

    with np.errstate(all="ignore"):
        wrong = x @ reference.dequantize(rows, w.format).T
    found = diagnose(wrong, x, w)
    assert found.causes[0].name == "row-stride"
    assert f"rows {step} bytes apart" in found.causes[0].parameter


def test_runs_that_differ():
    one, other = A @ B, A @ B
    other[3, 5] += 9
    found = diagnose([one, other], A, B)
    assert found.causes[0].name == "race"
    assert (found.verdict, found.wrong) == ("wrong", 1)
    assert found.first[0].startswith("[3, 5] is ")
    reversed_ = (A[:, ::-1] @ B[::-1]).astype(np.float32)
    found = diagnose([one, reversed_], A, B)
    assert (found.verdict, found.causes[0].name) == ("right", "other-order")
    for runs in ([one, one, other], [one, reversed_, other]):
        found = diagnose(runs, A, B)
        assert (found.verdict, found.causes[0].name) == ("wrong", "race")
    late = A @ B
    late[16:32, :16] -= A[16:32, :16] @ B[:16, :16]
    assert "; 1 of 9 tiles of 16 x 16 hold other sums" in diagnose([one, late], A, B).causes[0].parameter


def test_causes_that_not_every_run_shows_are_not_named(monkeypatch):
    one, other = (Cause(name, "", 0.0, 1.0, "") for name in ("m-tail", "n-tail"))
    found = iter((Diagnosis("wrong", (one, other)), Diagnosis("wrong", (other,))))
    monkeypatch.setattr("isogemm.doctor.results.search", lambda *_, **__: next(found))
    assert diagnose([A @ B, A @ B + 1], A, B).causes == (other,)


@pytest.mark.parametrize("kind", [np.float32, np.float16, BF16])
def test_a_race_is_seen_in_one_run(kind):
    """Tiles whose sums lack blocks, each its own, or that lie where others belong; one bad element is no race."""
    a, b = A.astype(kind), B.astype(kind)
    x, y = a.astype(np.float32), b.astype(np.float32)
    late, over, bad = x @ y, x @ y, x @ y
    for i, j, block in ((0, 16, 0), (16, 0, 2), (16, 32, 1)):
        rows, columns, k = (slice(start, start + 16) for start in (i, j, 16 * block))
        late[rows, columns] -= x[rows, k] @ y[k, columns]
    over[16:32, :16] = over[:16, 16:32]
    bad[3, 5] += 9
    for observed, words in ((late, "3 of 9 tiles of 16 x 16"), (over, "holds what belongs to the one at [0, 16]")):
        found = diagnose(observed.astype(kind), a, b)
        assert (found.verdict, [cause.name for cause in found.causes]) == ("wrong", ["race"])
        assert words in found.causes[0].parameter
    assert diagnose(bad.astype(kind), a, b, pairs=False).causes == ()


def test_another_order_than_the_contract_is_named():
    from isogemm.contract import reference

    tree = reference.evaluate(A, B, "fma/tree4")
    assert diagnose(tree, A, B, contract="fma/tree4").causes == ()
    found = diagnose(tree, A, B, contract="fma/chain")
    assert (found.verdict, found.exit_status, found.causes[0].name) == ("right", 0, "other-order")
    assert "not the bits of fma/chain: fma/tree4" in str(found)
    with pytest.raises(ContractError):
        diagnose(tree, A, B, contract="fma/no-such-order")


def test_what_operands_cannot_tell():
    """Square, symmetric, constant: the mistake is among those that explain as much, and no false one is named alone."""
    square = drawn(32, 32)
    symmetric = square + square.T
    found = diagnose(symmetric.T @ square.T, symmetric, square)
    assert (found.verdict, "trans-b" in names(found)) == ("undiagnosable", True)
    assert found.limits
    for name, a, b in (("A", symmetric, square), ("B", square, symmetric)):
        assert [x[0] for x in diagnose(a @ b, a, b).limits if "is symmetric" in x] == [name]
    ones = np.ones((32, 32), np.float32)
    found = diagnose(1.875 * ones @ ones, ones, ones)
    assert found.verdict == "undiagnosable" or names(found) == {"alpha-type"}
    assert diagnose(ones.T @ ones, ones, ones).verdict == "right"


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_empty_products_are_right(m, n, k):
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    assert diagnose(a @ b, a, b).verdict == "right"


@pytest.mark.parametrize("items", [(0, 0, 0), (0, 3, 3), (3, 0, 3), (3, 3, 0)])
def test_a_batch_without_items_is_refused(items):
    c, a, b = (np.zeros((count, 7, 7), np.float32) for count in items)
    with pytest.raises(ShapeError, match=r"items of .*: limit: a whole number of at least 1; got: 0"):
        diagnose(c, a, b)


@pytest.mark.parametrize("k", [0, 3])
def test_a_wrong_result_of_zeros_is_wrong(k):
    a, b = np.zeros((8, k), np.float32), np.zeros((k, 8), np.float32)
    assert diagnose(drawn(8, 8), a, b).verdict == "wrong"


def test_none_of_these_is_said():
    found = diagnose(A @ B + 0.01 * np.arange(41) ** 2, A, B, pairs=False)
    assert (found.verdict, found.causes) == ("wrong", ())
    assert "none of the mistakes" in str(found)


@pytest.mark.parametrize("right", [0, 1])
def test_runs_of_which_each_left_other_garbage_are_called_unwritten(right):
    """Whether or not an element of one of them is right by chance."""
    a, b, *runs = (drawn(*shape) for shape in ((128, 384), (384, 256), *[(128, 256)] * 3))
    runs[0][3, :right] = (a.astype(np.float64) @ b.astype(np.float64))[3, :right]
    found = diagnose(runs, a, b)
    assert (found.verdict, found.causes[0].name) == ("wrong", "m-tail")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_a_result_of_another_formula_is_not_called_unwritten(dtype):
    """Of few digits an element or two are right by chance; that nothing was written would explain every result."""
    a, b, wrong = (drawn(*shape, dtype=dtype) for shape in ((11, 37), (37, 13), (11, 13)))
    wrong[3, 4] = (a.astype(np.float64) @ b.astype(np.float64))[3, 4]
    found = diagnose(wrong, a, b)
    assert (found.verdict, found.causes, found.wrong) == ("wrong", (), found.elements - 1)


def test_descriptions_that_contradict_themselves_are_refused():
    with pytest.raises(ShapeError, match="inner dimensions"):
        diagnose(A @ B, A, B.T)
    with pytest.raises(ShapeError, match="observed"):
        diagnose((A @ B)[:5], A, B)
    with pytest.raises(OptionError, match="trans_a"):
        diagnose(A @ B, A, B, trans_a="Q")
    assert diagnose(A @ B, A, np.ascontiguousarray(B.T), trans_b="t").verdict == "right"
    with pytest.raises(DTypeError, match="without a mask"):
        diagnose(np.ma.masked_array(A @ B, A @ B > 0), A, B)
    with pytest.raises(DTypeError, match="without a mask"):
        diagnose(A @ B, A, np.ma.masked_array(B, B > 0))
    with pytest.raises(LayoutError, match="lda"):
        diagnose(A, A, B, m=37, n=41, k=53, lda=3)
    with pytest.raises(LayoutError, match="elements of b"):
        diagnose(A, A, B[:50], m=37, n=41, k=53)
    with pytest.raises(DTypeError, match="observed"):
        diagnose((A @ B).astype(np.int32), A, B)
    with pytest.raises(ShapeError, match="bias"):
        diagnose(A @ B, A, B, bias=BIAS[:5])
    with pytest.raises(ShapeError, match="runs"):
        diagnose([], A, B)
    with pytest.raises(OptionError, match=r"view.*nearest legal choice: ld"):
        diagnose(A, A, B, m=37, n=41, k=53, ldx=3)
    view = {"m": 37, "n": 41, "k": 53}
    with pytest.raises(OptionError, match=r"order: limit: one of F, C; got: 'X'"):
        diagnose(A @ B, A, B, **view, order="X")
    with pytest.raises(ShapeError, match=r"batch_count: limit: at least 1; got: 0"):
        diagnose(A @ B, A, B, **view, order="C", batch_count=0)
    with pytest.raises(DTypeError, match=r"lda: limit: a whole number; got: '53'"):
        diagnose(A @ B, A, B, **view, order="C", lda="53")
    with pytest.raises(ShapeError, match=r"offset_a: limit: one number, or one for each of 2; got: 3"):
        diagnose(A @ B, A, B, **view, order="C", batch_count=2, offset_a=[0, 1, 2])
    with pytest.raises(DTypeError, match=r"alpha: limit: a number; got: '1'"):
        diagnose(A @ B, A, B, alpha="1")
    with pytest.raises(OptionError, match=r"beta: limit: 0 without c; got: 1.0"):
        diagnose(A @ B, A, B, beta=1.0)
    with pytest.raises(DTypeError, match=r"dtype of bias"):
        diagnose(A @ B, A, B, bias=np.ones(41, np.int32))
    with pytest.raises(ShapeError, match=r"items of b: limit: a list of 37, as a is"):
        diagnose(A @ B, A.tolist(), B)
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(A)
    with pytest.raises(LayoutError, match="a dense one"):
        diagnose(A @ B, tensor.to_sparse(), B)
    with pytest.raises(DeviceError, match="meta"):
        diagnose(A @ B, tensor.to("meta"), B)


def test_results_without_numbers_tell_no_order():
    """They are the same in all, and nothing is warned of."""
    infinite = np.where(np.arange(37)[:, None] > 0, np.float32(np.inf), A)
    with np.errstate(all="ignore"):
        wanted = infinite @ B
    found = diagnose(wanted, infinite, B)
    assert (found.verdict, found.order) == ("right", "")


@pytest.mark.parametrize("kind", [list, np.array])
def test_offsets_of_each_item_are_a_list_or_an_array(kind):
    a, b, c = drawn(100), drawn(100), np.zeros(40, np.float32)
    at = {"a": [30, 0, 60], "b": [2, 40, 70], "c": [0, 12, 25]}
    for x, y, z in zip(*at.values(), strict=True):
        c[z : z + 6] = (a[x : x + 10].reshape(2, 5) @ b[y : y + 15].reshape(5, 3)).reshape(-1)
    view = {"m": 2, "n": 3, "k": 5, "order": "C"} | {f"offset_{name}": kind(places) for name, places in at.items()}
    assert diagnose(c, a, b, **view).verdict == "right"
    assert diagnose(c, a, b, **view | {"offset_a": 30}).verdict == "wrong"  # the same one for all
    with pytest.raises(ShapeError, match="offset_a: limit: one number, or one for each of 3; got: 2"):
        diagnose(c, a, b, **view | {"offset_a": kind([30, 0]), "batch_count": 3})


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (OptionError, "order", {"order": "row-major"}),
        (DTypeError, "lda", {"lda": "53"}),
        (DTypeError, "stride_b", {"stride_b": 0.5}),
        (DTypeError, "offset_c", {"offset_c": None}),
        (ShapeError, "batch_count", {"batch_count": 0}),
        (DTypeError, "beta", {"beta": "one"}),
        (DTypeError, "pairs: limit: True or False", {"pairs": "no"}),
        (DTypeError, "lda: limit: a whole number; got: 53.5; nearest legal choice: 53", {"lda": 53.5}),
        (DTypeError, "batch_count: .*; nearest legal choice: 1", {"batch_count": 1.0}),
        (
            LimitError,
            "batch_count: limit: at most ",
            {"batch_count": 2**40, "stride_a": 0, "stride_b": 0, "stride_c": 0},
        ),
    ],
)
def test_words_of_a_view_that_mean_nothing_are_refused(error, text, options):
    view = {"m": 37, "n": 41, "k": 53, "order": "C"}
    with pytest.raises(error, match=text):
        diagnose((A @ B).reshape(-1), A.reshape(-1), B.reshape(-1), **view | options)


@pytest.mark.parametrize("name", ["F32", "Q8_K"])
def test_formats_of_no_quantized_weights_are_refused(name):
    with pytest.raises(OptionError, match="format: limit: one of Q8_0"):
        diagnose(A @ B, A, np.zeros((41, 53 * 4), np.uint8), format=name)
    with pytest.raises(OptionError, match="format: limit: one of Q8_0"):
        examine(lambda x, blocks: x, "x, blocks", format=name)


def test_every_name_of_the_bank_has_a_mend():
    assert len(MISTAKES) == 35
    assert all(row.mend for row in MISTAKES.values())
