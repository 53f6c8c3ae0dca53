"""What `isogemm.torch` says to operands that are no tensors, and where torch is missing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import isogemm
from isogemm.errors import DTypeError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_operands_that_are_no_tensors(grad, buffer):
    x, w = torch.ones(3, 512), torch.ones(8, 512, requires_grad=grad)
    host = np.ones((8, 512), np.float32)
    options = {"main_grad": torch.zeros(8, 512)} if buffer else {}
    cases = [
        ("x", (x.numpy(), w, None)),
        ("w", (x, host, None)),
        ("w", (x, isogemm.pack(host), None)),
        ("bias", (x, w, np.ones(8, np.float32))),
        ("x", (None, w, None)),
    ]
    for name, operands in cases:
        with pytest.raises(DTypeError, match=rf"^{name} of linear: .*isogemm\.linear, for inference"):
            isogemm.torch.linear(*operands, **options)


def test_a_list_of_tensors_is_told_the_functions_for_those():
    items, w = [torch.ones(4), torch.ones(4)], torch.ones(3, 4)
    for call in (isogemm.linear, isogemm.torch.linear):
        with pytest.raises(
            DTypeError, match=r"^x.*got: list of tensors; nearest legal choice: torch\.stack\(x\).*grouped"
        ):
            call(items, w)


def test_integers_are_told_of_int8():
    with pytest.raises(DTypeError, match=r"by x\.float\(\), or torch\.int8 where every value fits, exactly, on a CPU"):
        isogemm.linear(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64))


def test_a_double_linear_has_a_name():
    for module, what in (
        (torch.nn.Linear(4, 4).double(), "^dtype of the Linear's weight"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4)).double(), "^dtype of 0.weight"),
    ):
        with pytest.raises(DTypeError, match=what + r".*by model\.float\(\) before convert"):
            isogemm.torch.convert(module)


def test_without_torch_the_import_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import isogemm; import isogemm.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert 'pip install "isogemm[torch]"' in last


def test_without_torch_the_package_can_be_looked_at():
    code = """if True:
        import sys; sys.modules['torch'] = None
        import inspect, io, pydoc, isogemm
        assert not hasattr(isogemm, 'torch')
        assert 'matmul' in dict(inspect.getmembers(isogemm))
        pydoc.Helper(output=io.StringIO()).help(isogemm)
        try:
            from isogemm import torch
        except ModuleNotFoundError as error:
            assert 'isogemm[torch]' in str(error)
        isogemm.torch
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("AttributeError: isogemm.torch ")
    assert 'pip install "isogemm[torch]"' in last
