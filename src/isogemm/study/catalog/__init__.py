"""The studies, one file each, by name: a new one is its file, with a `Study` named ``STUDY``, and its name here."""

from __future__ import annotations

from importlib import import_module

from ...base.arguments import unknown
from ..declare import Study

__all__ = ["STUDIES", "study"]

STUDIES = (
    "attention",
    "claims",
    "decode",
    "dispatch",
    "four-methods",
    "invariance-cost",
    "modes",
    "pointers",
    "prefill",
    "roofline",
    "why",
)


def study(name: str) -> Study:
    """The study of that name.

    Raises
    ------
    OptionError
        There is none; the error names the closest one.
    """
    if name not in STUDIES:
        raise unknown("study", name, STUDIES, "four-methods")
    found: Study = import_module(f"{__name__}.{name.replace('-', '_')}").STUDY
    return found
