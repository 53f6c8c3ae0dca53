"""torch's own checks of the operators for products, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
tree = pytest.importorskip("torch.utils._pytree")

from tests.products import BF16, F32  # noqa: E402
from tests.torch.gemm.test_ops import cases, tensor  # noqa: E402

import isogemm.torch  # noqa: E402, F401

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
OPS = torch.ops.isogemm


def up(arguments: Any) -> Any:
    """The arguments on the GPU, leaves of a graph again where they were."""

    def one(x: Any) -> Any:
        return x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tree.tree_map(one, arguments)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", cases())
def test_opcheck(name, dtype):
    torch.library.opcheck(getattr(OPS, name).default, up(cases(dtype)[name]))


def test_opcheck_of_the_walk():
    out = torch.zeros(5, 7, device="cuda")
    torch.library.opcheck(OPS.walk_.default, (*up((tensor((5, 32)), tensor((32, 7)))), out, "fma/leaf16"))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_opcheck_without_gradients(dtype):
    a, b, c, w = up(
        (tensor((5, 33), dtype, 1), tensor((33, 7), dtype, 2), tensor((7,), dtype, 3), tensor((7, 33), dtype))
    )
    torch.library.opcheck(OPS.product_forward.default, (c, a.expand(2, 5, 33), b.expand(2, 33, 7), 1.0, 1.0, "", None))
    torch.library.opcheck(OPS.linear_forward.default, (a, w, c, "", torch.float32))
