"""Programs: a training step, or a prefill, whose every buffer and every thread is written down before it runs.

`lower` turns a model into three representations: a graph (what is computed, with gradients), an execution plan and a
memory layout (who computes it and where it lies, as JSON), and calls that decide nothing. Any plan of one graph has the
same bits.
"""

from __future__ import annotations

from .executor import AdamW
from .model import DecoderConfig, decoder
from .plan import Choices
from .program import Program, Run, load, lower
from .tuning import tuned

__all__ = ["AdamW", "Choices", "DecoderConfig", "Program", "Run", "decoder", "load", "lower", "tuned"]
