"""The audit: which calls of a matrix product keep their bits, for isogemm and for anyone else's.

Examples
--------
>>> import isogemm.audit
>>> report = isogemm.audit.run(["isogemm", "numpy"], [(512, 384)], sweep=[1, 2, 16], speed=False)
>>> report.held("isogemm")
True
"""

from .cases import Case, Drift, Outcome, replay
from .data import WeightSource, read_shapes, weights_of_file
from .engine import DEFAULT_SHAPES, FULL_SHAPES, run
from .named import load_provider
from .providers import Absent, CallableProvider, Provider
from .relations import FULL_SWEEP, QUICK_SWEEP, RELATIONS, Relation
from .report import Report
from .results import SCHEMA, ProviderResult, RelationResult, Speed
from .transformer import RanksOutcome, compare_ranks, load, model

__all__ = [
    "DEFAULT_SHAPES",
    "FULL_SHAPES",
    "FULL_SWEEP",
    "QUICK_SWEEP",
    "RELATIONS",
    "SCHEMA",
    "Absent",
    "CallableProvider",
    "Case",
    "Drift",
    "Outcome",
    "Provider",
    "ProviderResult",
    "RanksOutcome",
    "Relation",
    "RelationResult",
    "Report",
    "Speed",
    "WeightSource",
    "compare_ranks",
    "load",
    "load_provider",
    "model",
    "read_shapes",
    "replay",
    "run",
    "weights_of_file",
]
