"""Benchmarks run as if nothing in the environment chose a peer's code."""

from __future__ import annotations

import pytest
from benchmarks.common import HELD_BY


@pytest.fixture(autouse=True)
def _peers_as_they_are(monkeypatch):
    for name in HELD_BY:
        monkeypatch.delenv(name, raising=False)
