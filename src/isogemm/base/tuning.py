"""How much time choosing kernels at run time may take; it changes the time of results, never a bit."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

from ..errors import OptionError

BUDGET = 30.0  # milliseconds of the device's time for each new product
_budget: float | None = None


def get_tuning() -> float:
    """Milliseconds of the device's time that may go into timing kernels for a new product; 0.0 where none may.

    What `set_tuning` was given, else ``ISOGEMM_TUNING``: ``off``, ``on`` (30 ms) or a number of milliseconds.
    """
    global _budget
    if _budget is None:
        text = os.environ.get("ISOGEMM_TUNING", "").strip().lower()
        _budget = _milliseconds("ISOGEMM_TUNING", text or "on")
    return _budget


def set_tuning(budget: float | str) -> None:
    """Set how kernels for new products are chosen on a GPU, for the process. Never changes a bit of any result.

    Parameters
    ----------
    budget : float or {"on", "off"}
        Milliseconds of the device's time for each new product, between the caller's own products; ``on`` is 30. With
        0 or ``off`` nothing is timed and nothing compiled in the background: what was timed before and a model choose,
        and a first call waits for its kernel.

    Raises
    ------
    OptionError
        Neither a number from 0 on nor one of the words.
    """
    global _budget
    _budget = _milliseconds("tuning", budget)


def _milliseconds(what: str, value: Any) -> float:
    found = {"on": BUDGET, "off": 0.0}.get(value, value) if isinstance(value, str) else value
    with contextlib.suppress(ValueError):
        found = float(found) if isinstance(found, str) else found
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise OptionError(what, limit="on, off, or milliseconds from 0 on", value=repr(value), nearest="on")
    return float(found)
