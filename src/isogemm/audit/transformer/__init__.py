"""The audit of a whole model: logits and gradients of a transformers model, and where two runs first differ."""

from .engine import SCHEMA, model
from .load import load
from .relations import RELATIONS, Relation, Scope

__all__ = ["RELATIONS", "SCHEMA", "Relation", "Scope", "load", "model"]
