"""One set of bits: the relations of batch invariance through the public call, on the models' shapes and on odd ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.backends.cuda.device import BF16, Mode, check_sample, differing, draw, modes, rounded, same, torch
from tests.backends.cuda.relations import RELATIONS, population, position

import isogemm
from isogemm.audit.relations import FULL_SWEEP
from isogemm.lab.models import MODELS, PROJECTION_SHAPES

pytestmark = pytest.mark.gpu

SHAPES = {name: model.linears() for name, model in MODELS.items()} | {"projections": PROJECTION_SHAPES}
ODD = ((160, 192), (251, 333), (1000, 1000), (129, 64), (1, 4096), (512, 2568), (2560, 9729), (4095, 4095))
SMALL = ((2560, 4096), (251, 333))


def call_of(mode: Mode, **more: Any) -> Callable[[Any, Any], Any]:
    """`isogemm.linear` under a mode."""
    return lambda x, w: isogemm.linear(x, w, **mode.options, **more)


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Other processes test on the same device."""
    yield
    torch.cuda.empty_cache()


@modes
@pytest.mark.parametrize("model", SHAPES)
def test_population_on_the_models_shapes(model: str, mode: Mode) -> None:
    """Every M of the sweep has the bits of the largest, whose samples have those of the definition."""
    for n, k in dict.fromkeys((linear.n, linear.k) for linear in SHAPES[model]):
        x, w = draw((max(FULL_SWEEP), k), mode.dtype, seed=k, special=True), draw((n, k), mode.dtype, seed=n)
        exact = isogemm.linear(x, w, out_dtype=torch.float32, **mode.options)
        check_sample(exact, x, w.T, mode)
        want = rounded(exact, mode.dtype)
        for m in FULL_SWEEP:
            same(isogemm.linear(x[:m], w, **mode.options), want[:m], f"{mode} {model} n={n} k={k} m={m}")
        if mode.dtype != "float32":  # 16 bits of output could hide a difference
            for m in FULL_SWEEP[::7]:
                got = isogemm.linear(x[:m], w, out_dtype=torch.float32, **mode.options)
                same(got, exact[:m], f"{mode} {model} n={n} k={k} m={m}, float32 out")


@modes
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_population_on_odd_shapes(shape: tuple[int, int], mode: Mode) -> None:
    x, w = draw((1024, shape[1]), mode.dtype, seed=5, special=True), draw(shape, mode.dtype, seed=6)
    exact = isogemm.linear(x, w, out_dtype=torch.float32, **mode.options)
    check_sample(exact, x, w.T, mode)
    same(isogemm.linear(x, w, **mode.options), rounded(exact, mode.dtype))
    assert population(call_of(mode), x, w) == 0
    assert population(call_of(mode, out_dtype=torch.float32), x, w, FULL_SWEEP[::4]) == 0


@modes
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("relation", [name for name in RELATIONS if name != "population"])
def test_relations(relation: str, shape: tuple[int, int], mode: Mode) -> None:
    x, w = draw((1025, shape[1]), mode.dtype, seed=7, special=True), draw(shape, mode.dtype, seed=8)
    assert RELATIONS[relation](call_of(mode), x, w) == 0


@modes
def test_packing(mode: Mode) -> None:
    """A weight prepared first."""
    x, w = draw((256, 333), mode.dtype, seed=1), draw((251, 333), mode.dtype, seed=2)
    packed = isogemm.pack(w)
    for m in (1, 5, 64, 256):
        same(isogemm.linear(x[:m], packed, **mode.options), isogemm.linear(x[:m], w, **mode.options))


def test_float32_has_the_bits_of_the_cpu_backend() -> None:
    x, w = draw((65, 1000), "float32", seed=3, special=True), draw((203, 1000), "float32", seed=4)
    same(isogemm.linear(x, w).cpu().cuda(), isogemm.linear(x.cpu(), w.cpu()).cuda())


def split_k(x: Any, w: Any) -> Any:
    """Broken on purpose: for few rows K is cut in two and the halves are added, as split-K does."""
    if x.ndim == 1 or len(x) > 16:
        return isogemm.linear(x, w)
    half, f32 = x.shape[1] // 2, torch.float32
    left = isogemm.linear(x[:, :half], w[:, :half], out_dtype=f32)
    return (left + isogemm.linear(x[:, half:], w[:, half:], out_dtype=f32)).to(x.dtype)


def turned(x: Any, w: Any) -> Any:
    """Broken on purpose: odd batches walk K backwards."""
    if x.ndim == 1 or len(x) % 2 == 0:
        return isogemm.linear(x, w)
    return isogemm.linear(x.flip(1), w.flip(1))


def by_place(x: Any, w: Any) -> Any:
    """Broken on purpose: the last row of a batch is computed with another kernel."""
    y = isogemm.linear(x, w)
    if x.ndim == 2 and len(x) > 1:
        y[-1] = split_k(x[-1:], w)[0]
    return y


@pytest.mark.parametrize("broken", [split_k, turned, by_place], ids=lambda f: f.__name__)
def test_broken_calls_are_seen(broken: Callable[[Any, Any], Any]) -> None:
    x, w = draw((1025, 1024), BF16.dtype, seed=9), draw((300, 1024), BF16.dtype, seed=10)
    assert population(broken, x, w) > 0
    if broken is by_place:
        assert position(broken, x, w) > 0


def test_torch_is_seen() -> None:
    """torch.mm as users get it does not keep its bits where it splits K; the same count sees that."""
    x, w = draw((1024, 9728), BF16.dtype, seed=11), draw((2560, 9728), BF16.dtype, seed=12)
    assert population(lambda x, w: torch.nn.functional.linear(x, w), x, w) > 0


def test_a_flipped_bit_is_counted() -> None:
    x = draw((64, 64), "float32", seed=1)
    y = x.clone()
    y.view(torch.int32)[63, 63] ^= 1
    assert differing(x, y) == 1
