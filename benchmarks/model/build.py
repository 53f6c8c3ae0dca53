"""A language model of random weights, and the ways in which it is run: plain torch, and isogemm's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..common import words_of
from .cases import LINEARS, ROUTED, TORCH, TREE, WHOLE, Case, Sizes

__all__ = ["Scoped", "Shelf", "Step", "cache_of", "forward", "random_model"]

Call = Callable[[int], Any]
Scope = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Step:
    """One candidate's call, and what surrounds it.

    Attributes
    ----------
    call : callable
        ``call(i)`` makes one step; its result is what is compared.
    scope : callable
        A context manager that has to be around calls and captures, and outside of what is timed.
    """

    call: Call
    scope: Scope = nullcontext

    def __call__(self, i: int) -> Any:
        return self.call(i)


class Scoped:
    """A clock that enters the scope of a `Step` before it looks at the time; see `isogemm.lab.Clock`."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def elapsed(self, run: Any, first: int, calls: int) -> float:
        """Seconds of the calls, within their scope."""
        with getattr(run, "scope", nullcontext)():
            return float(self._clock.elapsed(run, first, calls))

    def pause(self, seconds: float) -> None:
        """See `isogemm.lab.Clock`."""
        self._clock.pause(seconds)


@contextmanager
def _routed() -> Iterator[None]:
    """torch's products by isogemm, for the process; attention and rows stay torch's."""
    import isogemm.torch

    isogemm.torch.enable(rows=False, attention=False)
    try:
        yield
    finally:
        isogemm.torch.disable()


def _linears(model: Any) -> None:
    import isogemm.torch

    isogemm.torch.convert(model, parts=("linear",))


def _whole(model: Any) -> None:
    import isogemm.torch

    isogemm.torch.convert(model)


def _tree(model: Any) -> None:
    """As on each number of ranks up to eight: sums over what they would divide are trees."""
    import isogemm.torch
    from isogemm.torch.distributed import Ranks

    isogemm.torch.convert(model, tp=Ranks(order="tree8"))


# What is done to a copy of the model, and the scope that it runs in.
WAYS: Mapping[str, tuple[Callable[[Any], None] | None, Scope]] = {
    TORCH: (None, nullcontext),
    LINEARS: (_linears, nullcontext),
    ROUTED: (None, _routed),
    WHOLE: (_whole, nullcontext),
    TREE: (_tree, nullcontext),
}


@dataclass(slots=True)
class Shelf:
    """The models of a run, made when they are first asked for. All variants share one set of weights and one cache.

    Attributes
    ----------
    absent : dict of str to str
        Variants that could not be made, and why.
    """

    sizes: Sizes
    device: str
    seed: int
    absent: dict[str, str] = field(default_factory=dict)
    _models: dict[int, dict[str, Any]] = field(default_factory=dict)
    _compiled: dict[tuple[int, str], Any] = field(default_factory=dict)
    _cache: tuple[tuple[int, int], Any, Any] | None = None

    def models(self, layers: int) -> dict[str, Any]:
        """The variants of the model with so many layers (0: all of them), by name."""
        if layers not in self._models:
            self._models[layers] = self._variants(layers)
        return self._models[layers]

    def steps(self, case: Case, batch: int = 0) -> dict[str, Step]:
        """The candidates of a case of the model, or of the same case with other rows beside the first ones."""
        batch = batch or case.batch
        inputs = self.inputs(case, batch)
        found = {}
        for name, model in self.models(case.layers).items():
            if case.mode.startswith("compile"):
                if name == ROUTED:
                    continue  # compiled functions run eagerly while enable() is in force
                model = self.compiled(case.layers, name, model)
            found[name] = Step(forward(model, inputs), WAYS[name][1])
        return found

    def compiled(self, layers: int, name: str, model: Any) -> Any:
        """torch.compile of one variant, made once for the cases that run it."""
        import torch

        key = (layers, name)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(model, dynamic=False)
        return self._compiled[key]

    def inputs(self, case: Case, batch: int) -> dict[str, Any]:
        """Arguments of a model's call: row i has the same tokens and cache in every batch."""
        import torch

        generator = torch.Generator(self.device).manual_seed(self.seed)
        vocabulary = int(self.sizes.model["vocab_size"])
        ids = torch.randint(vocabulary, (64, case.tokens), generator=generator, device=self.device)
        positions = torch.arange(case.context - case.tokens, case.context, device=self.device)
        return {
            "input_ids": ids[:batch].contiguous(),
            "position_ids": positions[None],
            "past_key_values": self._slots(case, batch, positions),
            # What transformers would find for rows without padding: attention needs no mask, and none is made.
            "attention_mask": {"full_attention": None},
            "logits_to_keep": 1,
        }

    def _variants(self, layers: int) -> dict[str, Any]:
        base = random_model(self.sizes, layers, self.device, self.seed)
        shared = {id(p): p for p in base.parameters()}
        found = {}
        for name, (change, scope) in WAYS.items():
            model = copy.deepcopy(base, dict(shared)) if change else base
            try:
                if change:
                    change(model)
                with scope():
                    pass
            except Exception as error:
                self.absent[name] = words_of(error)
                continue
            found[name] = model
        return found

    def _slots(self, case: Case, batch: int, positions: Any) -> Any:
        import torch

        layers, size = self.sizes.model, (max(batch, 2 if case.phase == "prefill" else 64), case.context)
        if self._cache is None or self._cache[0] != size:
            self._cache = None  # what held the last one goes first
            heads, width, depth = (int(layers[key]) for key in KEYS)
            shape = (2 * depth, size[0], heads, size[1], width)
            generator = torch.Generator(self.device).manual_seed(self.seed + 1)
            dtype = getattr(torch, self.sizes.dtype)
            data = torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=generator)
            self._cache = (size, data[:depth], data[depth:])
        _, keys, values = self._cache
        return cache_of(keys[:, :batch], values[:, :batch], positions)


KEYS = ("num_key_value_heads", "head_dim", "num_hidden_layers")


def random_model(sizes: Sizes, layers: int, device: str, seed: int) -> Any:
    """The model in evaluation mode, with random weights that are drawn on the device."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = dict(sizes.model)
    if layers:
        settings["num_hidden_layers"] = layers
    config = Qwen3Config(**settings)
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, sizes.dtype))
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def forward(model: Any, inputs: Mapping[str, Any]) -> Call:
    import torch

    def call(i: int) -> Any:
        with torch.no_grad():
            return model(**inputs).logits

    return call


def cache_of(keys: Any, values: Any, positions: Any) -> Any:
    """A preallocated cache whose new tokens always go to the same places, so that a step can be repeated."""
    from transformers.cache_utils import Cache

    return Cache(layers=[_slots_type()(k, v, positions) for k, v in zip(keys, values, strict=True)])


def _slots_type() -> Any:
    global _Slots
    if _Slots is None:
        from transformers.cache_utils import CacheLayerMixin

        class Slots(CacheLayerMixin):
            """One layer's keys and values, full."""

            is_compileable = True

            def __init__(self, keys: Any, values: Any, positions: Any) -> None:
                super().__init__()
                self.keys, self.values, self.positions, self.is_initialized = keys, values, positions, True

            def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
                """Nothing is left to do."""

            def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
                """Write the new tokens, as transformers' static cache does."""
                self.keys.index_copy_(2, self.positions, key_states)
                self.values.index_copy_(2, self.positions, value_states)
                return self.keys, self.values

            def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
                """All keys, from the first on."""
                return self.keys.shape[2], 0

            def get_seq_length(self) -> int:
                """Keys that were there before the call."""
                return int(self.keys.shape[2] - self.positions.shape[0])

            def get_max_length(self) -> int:
                """Keys that fit."""
                return int(self.keys.shape[2])

        _Slots = Slots
    return _Slots


_Slots: Any = None
