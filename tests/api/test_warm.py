"""`isogemm.warm`: what it asks of a device for models and shapes, what it says, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.planner import conftest as planner_fakes
from tests.planner.fakes import flip
from tests.planner.test_live import Here

import isogemm
from isogemm.api import warm as module
from isogemm.backends.cuda.device import CudaDevice
from isogemm.base import tuning
from isogemm.contract.spec import Contract
from isogemm.errors import DeviceError, DTypeError, OptionError, ShapeError
from isogemm.operands.device_array import HOST, DeviceId

fake_sources = planner_fakes.fake_sources
GPU = DeviceId("cuda", 0)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(tuning, "_budget", 0.0)
    times = {"best": 12.0, "second": 9.0, "right": 5.0, "broken": 1.0}
    found = Here(None, times.__getitem__, own=("best", "second"), offered=("broken", "right"), wrong={"broken": flip()})
    submit = found.bench.submit
    found.bench.submit = lambda task, rank: submit(task, rank) or found.bench.work()
    contract = Contract.parse("tensor_core:sm90/chain")
    device = SimpleNamespace(chooser=found.chooser, default=lambda a, b: contract, column=CudaDevice(GPU).column)
    monkeypatch.setattr(module, "open_device", lambda place: device)
    monkeypatch.setattr(module, "find", lambda device: HOST if device == "cpu" else GPU)
    return found


def test_shapes_are_settled_class_by_class(here):
    done = isogemm.warm([(48, 64), (32, 64), (48, 64)], range(1, 17))
    assert [(x.n, x.m, x.config) for x in done.plans] == [
        (n, m, "right") for n in (48, 32) for m in (1, 8, 16)
    ]  # fmt: skip
    assert all(x.reason.startswith("timed live at m") and "3 candidates" in x.reason for x in done.plans)
    assert (done.admitted, done.refused) == (6, 6)
    assert str(done).startswith("6 products, the kernels of 6 by their times; of a library's algorithms 6 admitted, 6 ")


def test_sizes_may_be_of_another_library(here, monkeypatch):
    served = []
    monkeypatch.setattr(here.live, "warm", lambda products, tell, budget: served.extend(products))
    isogemm.warm([(np.int64(48), np.int32(64))], np.arange(1, 3), progress=False)
    assert [(p.m, p.n, p.k) for p in served] == [(1, 48, 64), (2, 48, 64)]
    assert {type(x) for p in served for x in (p.m, p.n, p.k, p.b.col)} == {int}
    served.clear()
    isogemm.warm([(48, 64)], np.array(3), progress=False)
    assert [p.m for p in served] == [3]


def test_a_models_linear_layers_are_what_is_meant(here, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(module, "of_tensor", lambda x: GPU)
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64),
        torch.nn.Linear(64, 48, bias=False),
        torch.nn.LayerNorm(48),
        torch.nn.Linear(48, 32),
    ).to(torch.bfloat16)
    served = []
    monkeypatch.setattr(here.live, "warm", lambda products, tell, budget: served.extend(products))
    isogemm.warm(model, 16, progress=False)
    assert [(p.m, p.n, p.k, p.dtype_a, p.dtype_bias) for p in served] == [
        (16, 48, 64, "bfloat16", None), (16, 32, 48, "bfloat16", "bfloat16"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "m", "options", "error"),
    [
        ([], 1, {}, OptionError),
        ([(64, 0)], 1, {}, ShapeError),
        ([(64, 64)], 0, {}, ShapeError),
        ([(64, 64)], 1.5, {}, ShapeError),
        ([(64, 64)], np.array(1.5), {}, ShapeError),
        ([(64, 64)], [], {}, ShapeError),
        ([(64, 64, 64)], 1, {}, OptionError),
        ([64], 1, {}, OptionError),
        (64, 1, {}, OptionError),
        (np.array(64), 1, {}, OptionError),
        ([(64, 64)], [1, True], {}, ShapeError),
        ([(64, 64)], 1, {"dtype": "int8"}, DTypeError),
        ([(64, 64)], 1, {"device": "cpu"}, DeviceError),
    ],
)
def test_what_is_refused(shapes, m, options, error, here):
    with pytest.raises(error):
        isogemm.warm(shapes, m, **options)
    assert not here.bench.compiled
