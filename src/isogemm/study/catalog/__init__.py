"""The studies, one file each, by name: a new one is its file, with a `Study` named ``STUDY``, and its row here."""

from __future__ import annotations

from importlib import import_module

from ...base.arguments import unknown
from ..declare import Study

__all__ = ["STUDIES", "study"]

STUDIES = {
    "attention": "attention",
    "claims": "claims",
    "decode": "decode",
    "dispatch": "dispatch",
    "four-methods": "four_methods",
    "invariance-cost": "invariance_cost",
    "modes": "modes",
    "pointers": "pointers",
    "prefill": "prefill",
    "roofline": "roofline",
    "why": "why",
}


def study(name: str) -> Study:
    """The study of that name.

    Raises
    ------
    OptionError
        There is none; the error names the closest one.
    """
    if name not in STUDIES:
        raise unknown("study", name, STUDIES, "four-methods")
    found: Study = import_module(f"{__name__}.{STUDIES[name]}").STUDY
    return found
