"""What a compiler sees of layers that are cut, where no gradient is recorded: two operators, by the number of a layer.

A compiler takes no process group and no module for a constant, and would end its graph at either.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ..operator import Tensor, define_forward

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def numbered(layer: Any) -> int:
    """A number for a layer, which lives as long as that does."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, number: int) -> Tensor:
    y: Tensor = _layers[number].computed(x, w, bias)[0]
    return y


def _fake_linear(x: Tensor, w: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return x.new_empty(*_layers[number].shape_of(x), w.shape[0])


def _stacked(x: Tensor, number: int) -> Tensor:
    layer = _layers[number]
    found: Tensor = layer.ranks.stacked(x, layer.label)
    return found


def _fake_stacked(x: Tensor, number: int) -> Tensor:
    return x.new_empty(_layers[number].ranks.size, *x.shape)


linear_op = define_forward(
    "parallel_linear", "(Tensor x, Tensor w, Tensor? bias, int layer) -> Tensor",
    {"CompositeExplicitAutograd": _linear}, _fake_linear,
)  # fmt: skip
stacked_op = define_forward(
    "stacked", "(Tensor x, int layer) -> Tensor", {"CompositeExplicitAutograd": _stacked}, _fake_stacked
)
