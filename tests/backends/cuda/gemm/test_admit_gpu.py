"""On the GPU: kernels broken on purpose are refused, others serve with the right bits, and a verdict costs no call."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.backends.cuda import faults
from tests.backends.cuda.device import draw, same
from tests.backends.cuda.poison import poisoned

import isogemm
from isogemm.backends.cuda.attention import run as attention
from isogemm.backends.cuda.attention import steps
from isogemm.backends.cuda.driver import machine, nvrtc
from isogemm.base import seen
from isogemm.contract.attention import factor
from isogemm.errors import ContractError, DeviceError
from isogemm.planner import fingerprint
from isogemm.planner.admission import Admissions
from isogemm.planner.records import Records

__all__ = ["poisoned"]  # the fixture

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

Break = Callable[[str, str, str], None]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Verdicts of nobody, and tables of calls that are empty before and after."""

    def forget() -> None:
        seen.forget()
        steps.launch.cache_clear()

    forget()
    found = Admissions(machine.TorchMachine(0), Records(tmp_path / "records"))
    monkeypatch.setattr(machine, "_admissions", {0: found})
    yield found
    forget()


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Break:
    """Change one line of a kernel, which must be there, and with it every fingerprint."""
    package = tmp_path / "isogemm"
    folder = package / "backends" / "cuda"

    def change(file: str, old: str, new: str) -> None:
        if not folder.exists():
            shutil.copytree(fingerprint.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
            monkeypatch.setattr(nvrtc, "KERNELS", folder)
            monkeypatch.setattr(fingerprint, "PACKAGE", package)
        text = (folder / file).read_text()
        assert old in text, f"{file} has no {old}"
        (folder / file).write_text(text.replace(old, new))

    return change


def operands(tq: int = 200, tk: int = 300) -> list[Any]:
    return [draw((2, h, t, 128), "bfloat16", i) for i, (h, t) in enumerate(((4, tq), (2, tk), (2, tk)))]


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    c = float(factor(None, 128))
    return attention.forward(q, k, v, c=c, arithmetic="tensor_core:sm90", causal_offset=100, **options)


def states(found: Admissions) -> dict[str, str]:
    return {known.name: known.admission.state for known in found.known()}


@pytest.mark.parametrize("fault", faults.ATTENTION, ids=lambda f: f.new)
def test_a_broken_kernel_of_attention_is_not_used(fresh, damage, fault):
    q, k, v = operands()
    want = run(q, k, v)
    tried = {name: state for name, state in states(fresh).items() if name.startswith("attention")}
    assert tried == {"attention hopper": "admitted"}  # products of tests before may be tried meanwhile
    seen.forget()
    damage(*fault)
    got = run(q, k, v)
    assert states(fresh)["attention walk"] == "admitted"
    assert [x.admission.state for x in fresh.known()].count("refused") == 1
    for one, other in zip(got, want, strict=True):
        same(one, other)
    with pytest.raises(
        ContractError, match=r"no kernel on NVIDIA.*attention hopper .*: refused .* differ, first [yml]\["
    ):
        run(q, k, v, kernel="hopper")


def test_broken_steps_that_kernels_share(fresh, damage):
    q, k, v = operands(1, 4096)
    want = run(q, k, v)
    seen.forget()
    damage(*faults.SHARED_STEPS)
    same(run(q, k, v)[0], want[0])
    found = [(x.name, x.admission.state) for x in fresh.known()]
    for name in ("few", "hopper"):
        assert (f"attention {name}", "refused") in found
    assert ("attention walk", "admitted") in found  # Triton's


def test_broken_steps_of_gradients(fresh, damage):
    damage(*faults.GRADIENT_STEPS)
    s = draw((2, 3, 40), "float32", 1)
    m, total, delta = (draw((2, 3, 1), "float32", i).abs() for i in (2, 3, 4))
    with pytest.raises(ContractError, match=r"attention backward .*: refused .* differ, first ds\["):
        steps.steps(s, m, total, c=0.1, dtype=torch.float32, dp=s, delta=delta)


def test_leaves_that_meet_in_another_order_are_not_used(fresh, damage, monkeypatch):
    """Halves far apart meet first: the same sums to a reader, other bits."""
    from isogemm.backends.cuda.gemm.choose import forget

    monkeypatch.setattr("isogemm.planner.products.get_tuning", lambda: False)  # the first choice serves, no other
    x, w = draw((64, 16400), "bfloat16", 1), draw((256, 16400), "bfloat16", 2)
    forget()
    want = isogemm.linear(x, w, contract="tensor_core:sm90/tree8")
    assert "leaves" in {known.name for known in fresh.known() if known.admission.state == "admitted"}
    forget()
    seen.forget()
    for fault in faults.MEETING:
        damage(*fault)
    same(isogemm.linear(x, w, contract="tensor_core:sm90/tree8"), want)
    known = {(known.name, known.admission.state) for known in fresh.known()}
    assert known >= {("leaves", "refused"), ("chain", "admitted")}
    forget()


@pytest.mark.parametrize("fault", faults.ROWS, ids=lambda f: f.new)
def test_a_broken_kernel_along_rows_is_not_used(fresh, damage, fault):
    from isogemm.torch import reductions

    x, w = draw((64, 4096), "float32", 1), draw((4096,), "float32", 2)
    want = reductions.rms_norm(x, w)
    seen.forget()
    damage(*fault)
    same(reductions.rms_norm(x, w), want)
    assert states(fresh)["rows long"] == "admitted"
    assert [x.name for x in fresh.known() if x.admission.state == "refused"] == ["rows held"]


def test_where_no_kernel_along_rows_is_right(fresh, damage):
    from isogemm.torch import reductions

    damage(*faults.LOGARITHM)
    with pytest.raises(ContractError, match=r"rows held .*: refused .*rows long .*: refused"):
        reductions.log_softmax(draw((64, 4096), "float32", 1))


def test_a_first_call_in_a_capture_is_a_typed_error(fresh):
    from isogemm.torch import reductions

    x = draw((64, 96), "bfloat16", 1)
    q, k, v = operands()
    for call in (lambda: reductions.silu(x), lambda: run(q, k, v)):

        def captured(call: Any = call) -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.add(1)  # an empty graph is a warning
                call()

        with pytest.raises(DeviceError, match="call once with these shapes before capturing"):
            captured()
        torch.cuda.synchronize()
        want = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        graph.replay()
        same(*((got, want) if torch.is_tensor(got) else (got[0], want[0])))


def test_later_calls_look_nothing_up(fresh, monkeypatch):
    from isogemm.torch import reductions

    x = draw((4, 256), "bfloat16", 1)
    q, k, v = operands(1, 300)
    for _ in range(2):
        reductions.silu(x), run(q, k, v)
    monkeypatch.setattr(Admissions, "verdict", lambda *a, **b: pytest.fail("a later call looked a verdict up"))
    start = time.perf_counter()
    for _ in range(1000):
        run(q, k, v, stats=True)
    print(f"attention {1000 * (time.perf_counter() - start):.1f} us a call")
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(1000):
            reductions.silu(x)
    print(f"silu {1000 * (time.perf_counter() - start):.1f} us a call")
