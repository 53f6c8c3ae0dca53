"""The studies, one file each, by name: a new one is its file, with a `Study` named ``STUDY``, and its row here."""

from __future__ import annotations

import difflib
from importlib import import_module

from ...errors import OptionError
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
        close = (difflib.get_close_matches(name, STUDIES, n=1, cutoff=0.0) or list(STUDIES))[0]
        raise OptionError("unknown study", limit="one of " + ", ".join(STUDIES), value=repr(name), nearest=close)
    found: Study = import_module(f"{__name__}.{STUDIES[name]}").STUDY
    return found
