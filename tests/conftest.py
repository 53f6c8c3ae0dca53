"""What a test changes in the process, it changes back: the next one would depend on their order."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


def _loggers() -> tuple[object, ...]:
    ours = logging.getLogger("isogemm")
    return ours.level, ours.disabled, ours.propagate, logging.root.level, logging.root.manager.disable


@pytest.fixture(autouse=True)
def loggers_are_left_as_they_were() -> Iterator[None]:
    """Fails the test that leaves a level behind, rather than one that looks for a message later."""
    before = _loggers()
    yield
    after = _loggers()
    if after != before:
        ours = logging.getLogger("isogemm")
        ours.level, ours.disabled, ours.propagate, logging.root.level, logging.root.manager.disable = before
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # what loggers remember of levels
        pytest.fail(f"loggers' state {before} was left as {after}")
