"""Scopes of routing: nested, left by exceptions, in threads, generators and tasks; and in the whole process."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.torch.routing.routed import LEAVES, clean, gemm, modes, randn, same  # noqa: F401

import isogemm
from isogemm.errors import OptionError, ShapeError

torch = pytest.importorskip("torch")

from isogemm.torch.routing import scope as routing  # noqa: E402
from isogemm.torch.routing.scope import invariant  # noqa: E402


def test_exceptions_and_nesting_restore_the_state():
    a, b = randn(9, 300), randn(300, 20)
    plain, leaves, tree = a @ b, gemm(a, b), isogemm.matmul(a, b, contract="fma/tree4")
    with pytest.raises(ZeroDivisionError), invariant(LEAVES), invariant("fma/tree4"):
        raise ZeroDivisionError
    scope = invariant(LEAVES)
    with scope:
        assert same(a @ b, leaves)
        with invariant("fma/tree4"):
            assert same(a @ b, tree)
            with scope:
                assert same(a @ b, leaves)
            assert same(a @ b, tree)
        assert same(a @ b, leaves)
        with pytest.raises(ShapeError):
            a @ a
        assert same(a @ b, leaves)
    assert same(a @ b, plain)
    assert not routing.active()


def test_scopes_may_end_out_of_order():
    def routed(contract):
        with invariant(contract):
            yield

    a, b = randn(9, 300), randn(300, 20)
    first, second = routed(LEAVES), routed("fma/tree4")
    next(first), next(second)
    first.close()
    assert same(a @ b, isogemm.matmul(a, b, contract="fma/tree4"))
    second.close()
    assert modes() == (0, 0)


def test_a_decorated_generator_is_inside_only_while_it_runs():
    a, b = randn(9, 300), randn(300, 20)

    @invariant(LEAVES)
    def products():
        for _ in range(2):
            yield a @ b

    for y in products():
        assert modes() == (0, 0)
        assert same(y, gemm(a, b))

    @invariant(LEAVES)
    def product():
        return a @ b

    assert same(product(), gemm(a, b))
    for instead in (torch.nn.Linear(2, 2), product):
        with pytest.raises(OptionError, match=r"neither a model nor a function.*`with isogemm.torch.invariant\(\):`"):
            invariant(instead)
    with pytest.raises(OptionError, match="coroutine"):

        @invariant()
        async def later():
            return a @ b


def test_asynchronous_code_that_does_not_wait_inside():
    a, b = randn(9, 300), randn(300, 20)

    async def inside():
        await asyncio.sleep(0)
        with invariant(LEAVES):
            return a @ b

    async def both():
        return await asyncio.gather(inside(), asyncio.to_thread(torch.mm, a, b), inside())

    one, plain, two = asyncio.run(both())
    assert same(one, gemm(a, b))
    assert same(two, one)
    assert same(plain, torch.mm(a, b))


def test_two_threads_do_not_disturb_each_other():
    a, b, w = randn(40, 600), randn(600, 20), randn(20, 600, grad=True)
    plain, routed = a @ b, gemm(a, b)
    (plain_grad,) = torch.autograd.grad((a @ w.T).square().sum(), w)
    with invariant(LEAVES):
        (routed_grad,) = torch.autograd.grad((a @ w.T).square().sum(), w)
    assert not same(plain, routed)
    assert not same(plain_grad, routed_grad)
    wrong, barrier = [], threading.Barrier(4)

    def run(inside):
        barrier.wait()
        for _ in range(60):
            if inside:
                with invariant(LEAVES):
                    y, (g,) = a @ b, torch.autograd.grad((a @ w.T).square().sum(), w)
            else:
                y, (g,) = a @ b, torch.autograd.grad((a @ w.T).square().sum(), w)
            ok = same(y, routed if inside else plain) and same(g, routed_grad if inside else plain_grad)
            if not ok or modes() != (0, 0):
                wrong.append(inside)

    threads = [threading.Thread(target=run, args=(i % 2 == 0,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_leaving_on_another_thread_is_an_error():
    scope, raised = invariant(), []

    def leave():
        try:
            scope.__exit__(None, None, None)
        except OptionError as error:
            raised.append(error)

    with scope:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert routing.active()
    assert len(raised) == 1


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_enable_routes_every_thread_and_disable_gives_torch_back(inference):
    a, w, bias = randn(2, 40, 600).transpose(0, 1), randn(20, 600, grad=True), randn(20)
    linear = torch.nn.functional.linear
    got = {}

    def run(key):
        with torch.inference_mode(inference):
            y = linear(a, w, bias)
        got[key] = (y, None if inference else torch.autograd.grad(y.square().sum(), w)[0])

    run("before")
    routing.enable("fma/tree4")
    try:
        routing.enable(LEAVES)
        assert routing.active()
        run("inside")
        thread = threading.Thread(target=run, args=("thread",))
        thread.start()
        thread.join()
        with invariant("fma/tree4"):
            run("tree")
        double = a.double() @ w.double().T
        half = torch.addmm(torch.zeros(20).half(), a[0].half(), w.half().T)
    finally:
        routing.disable()
        routing.disable()
    run("after")
    rows = a.reshape(80, 600)
    assert same(got["inside"][0].reshape(80, 20), gemm(rows, w.T, bias=bias))
    tree = isogemm.linear(rows, w.detach(), bias, contract="fma/tree4")
    assert same(got["tree"][0].reshape(80, 20), tree)
    assert torch.equal(double, a.double() @ w.double().T)
    assert same(half, gemm(a[0].half(), w.half().T))
    for first, second in (("inside", "thread"), ("before", "after")):
        assert same(got[first][0], got[second][0])
        assert inference or same(got[first][1], got[second][1])
    assert not same(got["before"][0], got["inside"][0])


def test_a_torch_that_cannot_give_its_kernels_back_is_left_alone(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(OptionError, match="get_kernel"):
        isogemm.torch.enable()
    assert not isogemm.torch.enabled()
