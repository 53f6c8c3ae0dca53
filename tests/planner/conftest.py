"""Fakes have no sources: their homes stand for them. What is said once is said in each test."""

from __future__ import annotations

import pytest

from isogemm.planner import admission, records


@pytest.fixture(autouse=True)
def fake_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "fingerprint", lambda home: home)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_said", set())
