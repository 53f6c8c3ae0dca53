"""What an NVIDIA GPU computed, as tests/golden has it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"


def facts(name: str) -> dict[str, Any]:
    """The cases of one recording and how they were computed."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


@functools.cache
def vectors(name: str) -> dict[str, Any]:
    """Operands and results of one recording, as bits."""
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return dict(archive)
