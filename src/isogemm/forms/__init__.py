"""From one form of a product to another, and which one to use."""

from __future__ import annotations

from .convert import Advice, Condition, advise, gqa_scores, pointer_array, strided, wide

__all__ = ["Advice", "Condition", "advise", "gqa_scores", "pointer_array", "strided", "wide"]
