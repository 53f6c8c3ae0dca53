"""Which mistake made this result: a bank of mistakes, each simulated on the same buffers."""

from __future__ import annotations

from .attention import diagnose_attention
from .bank import MISTAKES
from .diagnosis import Cause, Diagnosis
from .examine import examine
from .guard import Guarded, GuardError, guard, guarded_empty
from .results import diagnose

__all__ = [
    "MISTAKES",
    "Cause",
    "Diagnosis",
    "GuardError",
    "Guarded",
    "diagnose",
    "diagnose_attention",
    "examine",
    "guard",
    "guarded_empty",
]
