"""What a test changes in the process, it changes back: the next one would depend on their order.

And what keeps the whole suite short where several processes share a few cores.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

# Examples have no time limit: a first call compiles, and other programs run beside the tests. They are the same in
# every run, here and in CI; `HYPOTHESIS_PROFILE=drawn` draws others.
settings.register_profile("drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("drawn"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Read when OpenMP's library is loaded. Its threads would otherwise spin while they wait, on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inductor takes the vectors that the CPU names at its word: else a compiler and a process that imports torch try each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Kernels are those that a test asks for; threads that compile better ones would take the cores of other tests.
os.environ.setdefault("ISOGEMM_TUNING", "off")

# Files that begin first, because they take longest; `--no-loadscope-reorder` keeps pytest-xdist from putting those
# with many tests first, whatever they cost. The first compiles for another CPU only. Of two processes the other one
# has compiled the kernels for this CPU meanwhile, so that neither does what the other has begun.
FIRST = (
    "targets/test_generic.py",
    "quant/test_in_place.py",
    "quant/test_invariance.py",
    "invariance/test_relations.py",
    "quant/test_linear.py",
    "targets/test_avx2.py",
    "backends/cuda/gemm/test_kernels_compile.py",
    "models/test_quantized.py",
    "benchmarks/test_gpu.py",
    "models/test_models.py",
    "distributed/test_worlds.py",
    "test_docs.py",
    "backends/cuda/rows/test_compile.py",
    "backends/cuda/attention/test_compile.py",
    "demo/test_cli.py",
    "backends/cuda/rows/test_admit.py",
    "torch/gemm/test_ops.py",
    "models/test_families.py",
    "models/test_experts.py",
    "models/test_serving.py",
    "test_site.py",
    "torch/model/test_huggingface.py",
    "backends/webgpu/test_vectors.py",
    "doctor/test_examine.py",
    "torch/quant/test_linear.py",
    "torch/test_storage.py",
    "benchmarks/test_quant_gpu.py",
    "models/test_training.py",
    "torch/quant/test_checkpoint.py",
    "torch/model/test_layers_main_grad.py",
    "torch/rows/test_compile.py",
    "torch/routing/test_elementwise.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What collecting makes lives to the end: Python's cyclic collector need not look at it, now or later."""
    gc.disable()
    try:
        if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
            _import_from_the_end(session)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_from_the_end(session: pytest.Session) -> None:
    """Two processes meet in the middle: each finds compiled, asserts rewritten, what the other has imported before.

    In the same order both would compile every file at the same time: of a fresh clone that took 18 s of each, this 13.
    What cannot be imported is said when it is collected.
    """
    for folder in reversed([session.config.rootpath / name for name in session.config.args]):
        for path in sorted(folder.rglob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):
                pytest.Module.from_parent(session, path=path).obj  # noqa: B018


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = config.rootpath / "tests"
    order = {here / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(FIRST)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if marked else None
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def _no_gpu() -> str | None:
    """What keeps tests of GPUs, which `pytest -m gpu` runs, from running here; None where they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA GPU"


@pytest.fixture(autouse=True, scope="session")
def clocks_do_not_rest() -> Iterator[None]:
    """Times that tests take prove no speed: what leaves the machine alone before each block only makes them long."""
    from isogemm.lab.clock import WallClock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WallClock, "pause", lambda self, seconds: None)
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit status, and what it wrote to either stream."""

    def call(*words: str) -> tuple[int, str, str]:
        from isogemm.cli.commands import command_line

        monkeypatch.setattr(sys, "argv", ["isogemm", *words])
        with pytest.raises(SystemExit) as end:
            command_line()
        return int(end.value.code or 0), *capsys.readouterr()

    return call


def _loggers() -> tuple[object, ...]:
    ours = logging.getLogger("isogemm")
    return ours.level, ours.disabled, ours.propagate, logging.root.level, logging.root.manager.disable


@pytest.fixture(autouse=True)
def torch_draws_alike() -> None:
    """What torch draws is the same in every run, and whatever ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)


@pytest.fixture(autouse=True)
def loggers_are_left_as_they_were() -> Iterator[None]:
    """Fails the test that leaves a level behind, rather than one that looks for a message later."""
    before = _loggers()
    yield
    after = _loggers()
    if after != before:
        ours = logging.getLogger("isogemm")
        ours.level, ours.disabled, ours.propagate, logging.root.level, logging.root.manager.disable = before
        logging.root.manager._clear_cache()  # what loggers remember of levels
        pytest.fail(f"loggers' state {before} was left as {after}")


@pytest.fixture(autouse=True)
def threads_are_left_as_they_were() -> Iterator[None]:
    """Those of isogemm and of torch, whatever a test sets them to."""
    ours, torch = sys.modules.get("isogemm.base.threads"), sys.modules.get("torch")
    before = ours.chosen if ours else 0, torch.get_num_threads() if torch else 0
    yield
    if (ours := sys.modules.get("isogemm.base.threads")) is not None:
        ours.chosen = before[0]
    if torch and torch.get_num_threads() != before[1]:
        torch.set_num_threads(before[1])


@pytest.fixture(autouse=True)
def the_cpu_keeps_its_usual_facts() -> Iterator[None]:
    """Where a test or a page allows tuning, thresholds are measured then, or in the next test, and would choose."""
    tuning = sys.modules.get("isogemm.base.tuning")
    before = None if tuning is None else tuning._budget
    yield
    if (tuning := sys.modules.get("isogemm.base.tuning")) is not None:
        tuning._budget = before
    facts = sys.modules.get("isogemm.backends.cpu.gemm.facts")
    if facts is not None and facts.facts().source == "measured":
        facts.set_facts(None)
