"""Every fault that is planted on a GPU has its text in today's kernels: elsewhere those tests do not run."""

from __future__ import annotations

import pytest
from tests.backends.cuda import faults

from isogemm.backends.cuda.driver.nvrtc import KERNELS


@pytest.mark.parametrize("fault", faults.ALL, ids=lambda f: f"{f.file}: {f.new}")
def test_its_text_is_there(fault):
    assert fault.old in (KERNELS / fault.file).read_text()
