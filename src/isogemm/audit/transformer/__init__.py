"""The audit of a whole model: logits and gradients of a transformers model, and where two runs first differ."""

from .engine import SCHEMA, model
from .load import load
from .ranks import RanksOutcome, compare_ranks
from .relations import RELATIONS, ModelRelation, ModelScope

__all__ = ["RELATIONS", "SCHEMA", "ModelRelation", "ModelScope", "RanksOutcome", "compare_ranks", "load", "model"]
