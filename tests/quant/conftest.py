"""GPU tests are skipped where there is no GPU, and say why."""

from tests.backends.cuda.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
