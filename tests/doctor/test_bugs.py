"""Mistakes that others made and reported, rebuilt small: each is named. The sources are public trackers."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm import quantize
from isogemm.doctor import diagnose, examine

RNG = np.random.default_rng(11)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def batched_stride():
    """Strides of a batch between row-major and column-major words: https://github.com/lattice/quda/issues/1554"""
    m, n, k, items = 19, 23, 29, 4
    a, b = drawn(items * m * k + 999), drawn(items, k, n)
    wrong = np.stack([a[p * k * k : p * k * k + m * k].reshape(m, k) @ b[p] for p in range(items)])
    call = {"m": m, "n": n, "k": k, "order": "C", "batch_count": items}
    return diagnose(wrong.reshape(-1), a, b.reshape(-1), **call)


def tf32_by_default():
    """float32 products by tf32: https://github.com/pytorch/pytorch/issues/53635"""
    a, b = drawn(37, 53), drawn(53, 41)
    cut = [((x.view(np.uint32) + 0xFFF + (x.view(np.uint32) >> 13 & 1)) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    return diagnose(cut[0] @ cut[1], a, b)


def missing_tail():
    """K that is no multiple of a block: https://github.com/triton-lang/triton/issues/630"""
    a, b = drawn(37, 101), drawn(101, 41)
    out = np.zeros((37, 41), np.float32)
    for k in range(0, 101 - 101 % 32, 32):
        out += a[:, k : k + 32] @ b[k : k + 32]
    return diagnose(out, a, b)


def nibbles_as_neighbours():
    """Split blocks read as pairs: https://github.com/kekzl/imp/pull/567"""
    w, x = quantize(drawn(31, 96), "Q4_0"), drawn(7, 96)
    blocks = w.rows.reshape(31, 3, 18)
    scale, codes = blocks[..., :2].copy().view(np.float16).astype(np.float32), blocks[..., 2:]
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(31, 3, 32).astype(np.float32) - 8
    return diagnose(x @ (scale * pairs).reshape(31, 96).T, x, w)


def signed_nibbles():
    """Unsigned codes read as signed: https://github.com/1bit-MONSTER/1bit-MONSTER/issues/1268"""
    w, x = quantize(drawn(31, 96), "Q4_0"), drawn(7, 96)
    blocks = w.rows.reshape(31, 3, 18)
    scale, codes = blocks[..., :2].copy().view(np.float16).astype(np.float32), blocks[..., 2:]
    both = np.concatenate([codes & 15, codes >> 4], -1).astype(np.int32)
    return diagnose(x @ (scale * np.where(both >= 8, both - 16, both)).reshape(31, 96).T, x, w)


def half_accumulator():
    """2048 + 1 is 2048: https://github.com/NVIDIA/cutlass/issues/1188"""
    a, b = drawn(17, 300).astype(np.float16), drawn(300, 19).astype(np.float16)
    acc = np.zeros((17, 19), np.float16)
    for k in range(300):
        acc = (acc.astype(np.float32) + a[:, k, None].astype(np.float32) * b[k].astype(np.float32)).astype(np.float16)
    return diagnose(acc, a, b)


def heads_tiled():
    """Key-value heads tiled, not repeated: https://github.com/onnx/onnx/pull/7274"""
    q, k = drawn(8, 13, 32), drawn(2, 32, 29)
    return diagnose(q @ np.tile(k, (4, 1, 1)), q, k)


def alpha_of_another_type():
    """float32 scalars where half was computed: https://github.com/NVIDIA/FasterTransformer/issues/49"""
    a, b = drawn(37, 53).astype(np.float16), drawn(53, 41).astype(np.float16)
    alpha = np.float32(1).view(np.uint32).astype(np.uint16).view(np.float16)  # its low half: 0
    return diagnose((float(alpha) * (a.astype("f4") @ b.astype("f4"))).astype(np.float16), a, b)


def beta_times_nan():
    """beta = 0 and a C that nobody wrote: https://github.com/icl-utk-edu/blaspp/issues/39"""
    a, b, c = drawn(37, 53), drawn(53, 41), drawn(37, 41)
    c[::3, ::2] = np.nan
    return diagnose(a @ b + 0 * c, a, b, c)


def shared_memory_race():
    """A tile overwritten while others still read it: https://github.com/sgl-project/sglang/pull/37287"""
    a, b = drawn(64, 128), drawn(128, 48)

    def run(seed):
        late, out = np.random.default_rng(seed).integers(0, 4, 3), a @ b
        for tile in late:
            out[16 * tile : 16 * tile + 16, :16] -= a[16 * tile : 16 * tile + 16, :64] @ b[:64, :16]
        return out

    return diagnose([run(0), run(1)], a, b)


def offset_in_32_bits():
    """row * ld beyond 32 bits, here items beyond 16: https://github.com/ml-explore/mlx/pull/3609"""
    m, n, k, items = 11, 13, 67, 100
    a, b = drawn(items * m * k), drawn(k, n)
    where = [p * m * k % 2**16 for p in range(items)]
    wrong = np.stack([a[o : o + m * k].reshape(m, k) @ b for o in where])
    call = {"m": m, "n": n, "k": k, "order": "C", "batch_count": items, "stride_b": 0}
    return diagnose(wrong.reshape(-1), a, b.reshape(-1), **call)


def unread_output():
    """An epilogue that reads fresh memory though beta is 0: https://github.com/flashinfer-ai/flashinfer/issues/4724"""
    return examine(lambda a, b, c, alpha, beta: alpha * (a @ b) + (beta or 1) * c, "a, b, c, alpha, beta")


def padded_output():
    """An output of padded rows that is written as if it had none: https://github.com/sonots/cumo/pull/302"""
    a, b, c = drawn(37, 53), drawn(53, 41), drawn(37 * 48)
    wrong = c.copy()
    wrong[: 37 * 41] = (a @ b).reshape(-1)
    call = {"m": 37, "n": 41, "k": 53, "order": "C", "ldc": 48}
    return diagnose(wrong, a.reshape(-1), b.reshape(-1), c, **call)


BUGS = {
    batched_stride: "stride-a", tf32_by_default: "tf32-rounding", missing_tail: "k-tail",
    nibbles_as_neighbours: "nibble-order", signed_nibbles: "signedness", half_accumulator: "half-accumulator",
    heads_tiled: "gqa-mapping", alpha_of_another_type: "alpha-type", beta_times_nan: "beta-garbage",
    shared_memory_race: "race", offset_in_32_bits: "pointer-offset",
    unread_output: "beta-garbage", padded_output: "ldc",
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_reported_mistake_is_named(bug):
    found = bug()
    assert found.verdict == "wrong"
    best = found.causes[0]
    assert BUGS[bug] in (best.name, *best.indistinguishable_from)
    assert "https://" in bug.__doc__
