"""Compiled and captured runs of the audit of a model, by a compiler and by graphs that are not there."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.small import SIZES, filled, same  # noqa: E402

from isogemm.audit.transformer.runs import Prompts  # noqa: E402
from isogemm.audit.transformer.subject import Subject  # noqa: E402

LENGTH, WINDOW = 17, 6
PROMPTS = Prompts.draw(3, LENGTH, SIZES["vocab_size"], 0)
RUNS = {
    "at once": PROMPTS.batch(range(3)),
    "left": PROMPTS.padded("left", 5, 3),
    "right": PROMPTS.padded("right", 5, 3),
    "chunks": PROMPTS.chunks([4, 4, 4, 4, 1], "static"),
    "tokens": PROMPTS.chunks([8, *[1] * 9], "static", 3),
    "tokens behind padding": PROMPTS.chunks([8, *[1] * 9], "static", 3, 5),
}


@pytest.fixture(scope="module")
def subject():
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=32)
    return Subject("convert", filled(config, torch.float32))


def check(subject, run):
    """Rows of sequence 0 are those of the prompt alone."""
    numbers, rows = subject.outputs(run)
    alone, want = subject.outputs(PROMPTS.batch([0]))
    assert np.array_equal(numbers, alone)
    assert same(rows, want)


@pytest.mark.parametrize("name", RUNS)
def test_steps_of_one_length_are_one_compiled_graph(name, subject, monkeypatch):
    """Behind the first: as many shapes as lengths, and nothing that the host counts."""
    shapes = []

    def compile_(module, **_):
        def call(**inputs):
            shapes.append(tuple(x.shape for x in inputs.values() if isinstance(x, torch.Tensor)))
            assert not any(layer.is_sliding for layer in getattr(inputs.get("past_key_values"), "layers", ()))
            return module(**inputs)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(subject, "_graphs", None)
    run = RUNS[name].by("compiled")
    check(subject, run)
    assert len(shapes) == len(run.steps) - bool(run.cache)
    assert len(set(shapes)) == len({step.ids.shape for step in run.steps[bool(run.cache) :]})


class Graphs:
    """Graphs in the place of CUDA's: a capture leaves no trace, and a replay is the same call on the same memory."""

    def __init__(self, monkeypatch, subject):
        self.model, self.recorded, self.replayed = subject.model, None, 0
        cuda = {"Stream": lambda device: self, "current_stream": lambda device: self, "graph": self.graph}
        cuda |= {"stream": lambda stream: nullcontext(), "CUDAGraph": lambda: self}
        for name, fake in cuda.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(subject, "model", self)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def wait_stream(self, other):
        pass

    def __call__(self, **inputs):
        found = self.model(**inputs)
        self.last = inputs, found
        return found

    @contextmanager
    def graph(self, _):
        memory = self._memory(self.last[0])
        before = [x.clone() for x in memory]
        yield
        for x, old in zip(memory, before, strict=True):
            x.copy_(old)
        self.recorded = self.last
        self.recorded[1].logits.fill_(float("nan"))

    def replay(self):
        inputs, found = self.recorded
        found.logits.copy_(self.model(**inputs).logits)
        self.replayed += 1

    def _memory(self, inputs):
        layers = getattr(inputs.get("past_key_values"), "layers", ())
        return [x for layer in layers for x in (layer.keys, layer.values, layer.cumulative_length)]


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_are_replayed_with_what_is_new(name, subject, monkeypatch):
    graphs = Graphs(monkeypatch, subject)
    run = RUNS[name].by("captured")
    numbers, rows = subject.outputs(run)
    monkeypatch.undo()
    alone, want = subject.outputs(PROMPTS.batch([0]))
    assert np.array_equal(numbers, alone)
    assert same(rows, want)
    assert (
        graphs.replayed
        == {"": 1, "static": sum(s.ids.shape[1] == run.steps[1].ids.shape[1] for s in run.steps[2:])}[run.cache]
    )
