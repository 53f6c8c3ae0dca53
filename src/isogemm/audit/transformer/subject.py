"""A model under one way of computing it: torch as it is, inside `isogemm.torch.invariant`, or converted."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ... import torch as routed
from ...torch import reductions
from ..data import Array
from ..providers import Absent
from .runs import ModelRun, Prompts, Step
from .serving import served
from .trace import Trace

MODES = {
    "plain": "torch as it is; micro-batches add up in .grad",
    "invariant": "inside isogemm.torch.invariant(); micro-batches add up in .grad",
    "convert": "a copy after isogemm.torch.convert, micro-batches adding up in the float32 buffers of use_main_grad",
}
"""Ways of computing a model, and what they are."""

Rows = tuple[Array, Any]
"""Numbers of tokens, ascending, and the model's output for each: a tensor [tokens, width] on the CPU."""


class Subject:
    """Runs one model in one mode.

    Parameters
    ----------
    mode : str
        One of `MODES`.
    model : torch.nn.Module
        Left as it is; `convert` works on a copy.
    contract : Contract or str, optional
        Of isogemm's products.
    grad_order : str
        With `convert`: order of the rows' sum in the weight gradients.
    quantize : str or dict, optional
        With `convert`: formats of Linear modules' weights; `quantized` says what became of them.

    Raises
    ------
    Absent
        The model cannot be converted.
    """

    def __init__(
        self, mode: str, model: Any, contract: Any = None, grad_order: str = "leaf64", quantize: Any = None
    ) -> None:
        self.mode, self.model, self.contract = mode, model, contract
        self.causal = _is_causal(model)
        self._graphs: Any = None
        self.quantized: dict[str, Any] = {}
        if mode == "convert":
            self.model = copy.deepcopy(model)
            try:
                quantized = {} if quantize is None else {"quantize": quantize, "fallback": "keep"}
                report = routed.convert(self.model, contract=contract, grad_order=grad_order, **quantized)
            except (ValueError, TypeError, ImportError) as error:
                raise Absent(f"cannot be converted: {error}") from error
            some = any(isinstance(child, routed.QuantizedLinear) for child in self.model.modules())
            if report.floats and not some:  # a model of floats would be what holds
                name, why = next(iter(report.floats.items()))
                raise Absent(f"quantize={quantize}: no weight fits; {name}: {why.removeprefix(f'{name}: ')}")
            if quantize is not None:
                self.quantized = _quantized(self.model, report.floats)

    @property
    def device(self) -> Any:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The mode in force, dropout off; everything as before at the end."""
        training = self.model.training
        self.model.eval()
        with contextlib.ExitStack() as stack:
            stack.callback(self.model.train, training)
            if self.mode == "invariant":
                stack.enter_context(routed.invariant(self.contract))
            yield

    def outputs(self, run: ModelRun, trace: Trace | None = None) -> Rows:
        """The outputs of a run's tokens: logits, or the last hidden state of a model without a head."""
        with self.scope(), torch.no_grad(), _recording(trace):
            if run.how == "captured":
                return _sorted(self._captured(run))
            if run.how == "served":
                return _sorted(served(self.model, run.steps[0].ids))
            return _sorted([self._call(step, cache, run, trace)[1] for step, cache in self._steps(run)])

    def gradients(self, run: ModelRun, prompts: Prompts, trace: Trace | None = None) -> dict[str, Any]:
        """The gradient of every parameter after a backward pass for each step: the mean loss of all tokens.

        The loss is -log p(next token), by isogemm's cross_entropy where the model is converted.
        """
        tokens = sum(step.ids.size for step in run.steps)
        self._forget()
        try:
            with self.scope(), torch.enable_grad(), _recording(trace):
                for step, cache in self._steps(run):
                    logits, _ = self._call(step, cache, run, trace)
                    labels = torch.as_tensor(prompts.labels(step), device=self.device)
                    (self._losses(logits, labels).sum() / tokens).backward()
            return dict(self._gradients())
        finally:
            self._forget()

    def _losses(self, logits: Any, labels: Any) -> Any:
        if self.mode == "convert":
            return reductions.cross_entropy(logits, labels, out_dtype=torch.float32)
        return -torch.log_softmax(logits.float(), -1).gather(-1, labels[..., None])

    def _steps(self, run: ModelRun) -> Iterator[tuple[Step, Any]]:
        cache = self._cache(run)
        for step in run.steps:
            yield step, cache

    def _cache(self, run: ModelRun) -> Any:
        if not run.cache:
            return None
        import transformers

        if run.cache == "static":
            config = _whole(self.model.config) if run.how else self.model.config
            return transformers.StaticCache(config=config, max_cache_len=static_length(run))
        return transformers.DynamicCache(config=self.model.config)

    def _call(self, step: Step, cache: Any, run: ModelRun, trace: Trace | None) -> tuple[Any, Rows]:
        if trace is not None:
            trace.step(step, static_length(run) if run.cache == "static" else step.keys.shape[1], self.device)
        inputs = self._inputs(step, cache, run)
        first = cache is not None and step is run.steps[0]
        y = _outputs((self._compiled() if run.how == "compiled" and not first else self.model)(**inputs))
        return y, _compared(step, y)

    def _inputs(self, step: Step, cache: Any, run: ModelRun) -> dict[str, Any]:
        mask, positions = step.mask, step.positions
        if mask is not None and run.how and run.cache == "static":  # one shape for all steps
            mask = np.pad(mask, ((0, 0), (0, static_length(run) - mask.shape[1])))
        if mask is None and run.how == "captured" and cache is None:
            mask = np.ones_like(
                step.ids
            )  # without one transformers makes a table, in captures alone: none is tried before
        if positions is None and run.how == "captured" and cache is not None:
            past, length = step.keys.shape[1] - step.ids.shape[1], step.keys.shape[1]
            positions = np.arange(past, length)[None]
        arrays = {"input_ids": step.ids, "attention_mask": mask, "position_ids": positions}
        inputs: dict[str, Any] = {k: torch.as_tensor(a, device=self.device) for k, a in arrays.items() if a is not None}
        if cache is not None:
            return inputs | {"past_key_values": cache, "use_cache": True}
        return inputs | ({"use_cache": False} if self.causal else {})

    def _compiled(self) -> Any:
        """The model by torch.compile, one graph for each shape: a break or too many recompilations are errors."""
        if self._graphs is None:
            self._graphs = torch.compile(self.model, fullgraph=True, dynamic=False)
        return self._graphs

    def _captured(self, run: ModelRun) -> list[Rows]:
        """A run's outputs: of shapes that a call has first eagerly, then by a graph, captured once and replayed.

        With a cache the first step fills it, and the second is the one that warms up; without, it is a call with other
        tokens.
        """
        cache, rows = self._cache(run), []
        steps = list(run.steps)
        if cache is None:
            steps = [replace(steps[0], ids=np.roll(steps[0].ids, 1)), *steps]
        held: dict[str, Any] = {}
        graph: Any = None
        for i, step in enumerate(steps):
            inputs = self._inputs(step, cache, run)
            if i < 1 + (cache is not None) or _shapes(inputs) != _shapes(held):
                held, graph = inputs, None
                rows.append(_compared(step, self._aside(held)))
                continue
            for name in _shapes(held):
                held[name].copy_(inputs[name])
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = _outputs(self.model(**held))
            graph.replay()
            rows.append(_compared(step, y))
        return rows if cache is not None else rows[1:]

    def _aside(self, inputs: dict[str, Any]) -> Any:
        """Outputs computed on another stream, as a capture needs it before."""
        side, own = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(own)
        with torch.cuda.stream(side):
            y = _outputs(self.model(**inputs))
        own.wait_stream(side)
        return y

    def _gradients(self) -> Iterator[tuple[str, Any]]:
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if self.mode == "convert":
            found |= {name: total for name, _, total in routed.main_grads(self.model)}
        for name, gradient in found.items():
            yield name, gradient.detach().cpu().clone()

    def _forget(self) -> None:
        for p in self.model.parameters():
            p.grad = None
        if self.mode == "convert":
            routed.use_main_grad(self.model)


def _quantized(model: Any, floats: dict[str, str]) -> dict[str, Any]:
    """Which Linear modules of a converted model have quantized weights, for the report."""
    layers = [child for child in model.modules() if isinstance(child, routed.QuantizedLinear)]
    return {
        "formats": dict(Counter(layer.format for layer in layers).most_common()),
        "weights": sum(layer.in_features * layer.out_features for layer in layers),
        "floats": dict(floats),
        "float_weights": sum(model.get_submodule(name).weight.numel() for name in floats),
    }


def _outputs(found: Any) -> Any:
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def _compared(step: Step, y: Any) -> Rows:
    b, t = np.nonzero(step.tokens >= 0)
    return step.tokens[b, t], y.detach()[b, t].cpu()


def static_length(run: ModelRun) -> int:
    """Slots of a static cache: some more than the run fills."""
    return int(run.steps[-1].keys.shape[1]) + 5


def _whole(config: Any) -> Any:
    """A configuration whose static cache keeps all keys, and counts them on the device.

    transformers' static cache of a sliding window counts on the host: a captured step stands still there, and each
    compiled one is another graph. What a query sees is in the mask.
    """
    config = copy.deepcopy(config)
    known = config.get_text_config(decoder=True)
    if getattr(known, "layer_types", None) is None:
        known.sliding_window = None
    else:
        known.layer_types = ["full_attention" if x == "sliding_attention" else x for x in known.layer_types]
    return config


def _shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.shape for name, x in inputs.items() if isinstance(x, torch.Tensor)}


def _is_causal(model: Any) -> bool:
    config = getattr(model, "config", None)
    return type(model).__name__.endswith("ForCausalLM") or bool(getattr(config, "is_decoder", False))


def _recording(trace: Trace | None) -> Any:
    return contextlib.nullcontext() if trace is None else trace.recording()


def _sorted(parts: list[Rows]) -> Rows:
    numbers = np.concatenate([n for n, _ in parts])
    order = np.argsort(numbers)
    return numbers[order], torch.cat([rows for _, rows in parts])[torch.as_tensor(order)]
