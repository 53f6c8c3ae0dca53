"""GPU tests: `pytest -m gpu` runs them; where there is no GPU they are skipped, and say why."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def missing() -> str | None:
    """What keeps GPU tests from running here; None where they can run."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
