"""Quantized weights: GGUF's block formats as data, matrices in them, and the files that hold them.

w = isogemm.quant.load("model.gguf")["blk.0.ffn_down.weight"]
y = isogemm.linear(x, w)
"""

from __future__ import annotations

from ..formats.blocks import FORMATS, BlockFormat, Field, format_of
from .encode import quantize
from .files import load
from .matrix import QuantizedMatrix
from .tensor_file import TensorFile

__all__ = ["FORMATS", "BlockFormat", "Field", "QuantizedMatrix", "TensorFile", "format_of", "load", "quantize"]
