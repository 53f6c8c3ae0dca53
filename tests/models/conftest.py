"""GPU tests of models: `pytest -m gpu` runs them; where there is no GPU they are skipped."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    try:
        import torch

        missing = not torch.cuda.is_available()
    except ImportError:
        missing = True
    if missing:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that torch can use"))
