"""The relations of a model's audit: pairs of runs whose common tokens must have equal bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .runs import ModelRun, Prompts

Params = Mapping[str, int | str]
_PADS = (3, 29)


@dataclass(frozen=True)
class ModelScope:
    """What the cases range over."""

    length: int  # tokens of a prompt
    batches: tuple[int, ...] = (2, 7, 32)
    chunks: tuple[int, ...] = (1, 7, 16, 64)
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)

    @property
    def batch(self) -> int:
        """The batch of relations that have one."""
        return sorted(self.batches)[len(self.batches) // 2]

    @property
    def sequences(self) -> int:
        """Prompts that the runs need."""
        return max(*self.batches, 2 * self.batch, *self.micro_batches)


@dataclass(frozen=True)
class ModelRelation:
    """A way in which calls of a model may differ without a right to other bits."""

    name: str
    meaning: str
    cases: Callable[[ModelScope], list[Params]]  # ``cases(scope)``: the parameters of each case
    # ``runs(prompts, scope, params)``: the two runs of one case
    runs: Callable[[Prompts, ModelScope, Params], tuple[ModelRun, ModelRun]]
    decoder: bool = False  # whether it needs a causal model
    gradients: bool = False  # whether gradients are compared, not outputs
    cuda: bool = False  # whether it needs a model on a GPU
    asked: bool = False  # whether it runs only where it is named
    not_inside: str = ""  # why it does not apply inside of `isogemm.torch.invariant`; empty where it does


def _alone(prompts: Prompts) -> ModelRun:
    return prompts.batch([0])


def _population(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    return _alone(prompts), prompts.batch(range(int(params["batch"])))


def _position(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    batch, index = int(params["batch"]), int(params["index"])
    moved = [*range(1, index + 1), 0, *range(index + 1, batch)]
    return prompts.batch(range(batch)), prompts.batch(moved)


def _neighbours(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    batch = int(params["batch"])
    others = [0] * (batch - 1) if params["neighbours"] == "copies" else range(batch, 2 * batch - 1)
    return prompts.batch(range(batch)), prompts.batch([0, *others])


def _padding(side: str) -> Callable[[Prompts, ModelScope, Params], tuple[ModelRun, ModelRun]]:
    def runs(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
        return _alone(prompts), prompts.padded(side, int(params["pad"]), int(params["batch"]))

    return runs


def _padding_cases(scope: ModelScope) -> list[Params]:
    return [{"pad": pad, "batch": batch} for pad in _PADS for batch in (1, scope.batch)]


def _prefill(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    size, cache = int(params["chunk"]), str(params["cache"])
    sizes = [size] * (prompts.length // size) + [prompts.length % size] * bool(prompts.length % size)
    return _alone(prompts), prompts.chunks(sizes, cache)


def _prefill_cases(scope: ModelScope) -> list[Params]:
    cells = [(c, "dynamic") for c in scope.chunks] + [(scope.chunks[-2:][0], "static")]
    return [{"chunk": size, "cache": cache} for size, cache in cells]


def _decode(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    first = prompts.length // 2
    sizes = [first, *[1] * (prompts.length - first)]
    return _alone(prompts), prompts.chunks(sizes, str(params["cache"]), int(params["batch"]), int(params["pad"]))


def _decode_cases(scope: ModelScope) -> list[Params]:
    cells = [(1, 0), (scope.batch, 0), (scope.batch, _PADS[-1])]
    return [{"cache": c, "batch": b, "pad": p} for c in ("dynamic", "static") for b, p in cells]


def _compiled(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    batch = int(params["batch"])
    if params["cache"] != "none":
        eager, run = _decode(prompts, scope, {**params, "pad": 0})
        return eager, run.by("compiled")
    return _alone(prompts), prompts.batch(range(batch)).by("compiled")


def _compiled_cases(scope: ModelScope) -> list[Params]:
    cells = [(1, "none"), (scope.batch, "none"), (1, "static"), (scope.batch, "static")]
    return [{"batch": batch, "cache": cache} for batch, cache in cells]


def _captured(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    eager, run = _decode(prompts, scope, {**params, "cache": "static", "pad": 0})
    return eager, run.by("captured")


def _load(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    requests = int(params["requests"])
    served = prompts.batch(range(requests)).by("served")
    return (_alone(prompts) if requests == 1 else _alone(prompts).by("served")), served


def _micro(prompts: Prompts, scope: ModelScope, params: Params) -> tuple[ModelRun, ModelRun]:
    total = max(scope.micro_batches)
    return prompts.micro_batches(total, total), prompts.micro_batches(int(params["size"]), total)


_ALL = (
    ModelRelation("rerun", "the same call again", lambda s: [{"batch": 1}], _population),
    ModelRelation(
        "population", "a prompt alone, and in a batch", lambda s: [{"batch": b} for b in s.batches], _population
    ),
    ModelRelation(
        "position",
        "a prompt at another index of the batch",
        lambda s: [{"batch": s.batch, "index": i} for i in sorted({1, s.batch // 2, s.batch - 1} - {0})],
        _position,
    ),
    ModelRelation(
        "neighbours",
        "a prompt beside other prompts, or beside copies of itself",
        lambda s: [{"batch": s.batch, "neighbours": kind} for kind in ("other", "copies")],
        _neighbours,
    ),
    ModelRelation("left-padding", "padding before the prompt", _padding_cases, _padding("left")),
    ModelRelation("right-padding", "padding behind the prompt", _padding_cases, _padding("right")),
    ModelRelation("prefill", "the prompt at once, and in chunks with a cache", _prefill_cases, _prefill, decoder=True),
    ModelRelation(
        "decode", "the prompt at once, and token by token with a cache", _decode_cases, _decode, decoder=True
    ),
    ModelRelation(
        "compiled",
        "the prompt eagerly and alone, and compiled by torch.compile: at once, and token by token with a cache",
        _compiled_cases,
        _compiled,
        decoder=True,
        asked=True,
        not_inside="compiled functions run eagerly inside isogemm.torch.invariant()",
    ),
    ModelRelation(
        "captured",
        "the prompt at once, and token by token in a captured CUDA graph",
        lambda s: [{"batch": batch} for batch in (1, s.batch, max(s.batches))],
        _captured,
        decoder=True,
        cuda=True,
        asked=True,
    ),
    ModelRelation(
        "load",
        "the prompt at once, and as a request of continuous batching: alone, and among others that come and go",
        lambda s: [{"requests": n} for n in (1, *sorted(s.batches))],
        _load,
        decoder=True,
        asked=True,
        not_inside="a thread of transformers computes requests, and a scope belongs to its own thread",
    ),
    ModelRelation(
        "micro-batches",
        "gradients of a batch at once, and summed over micro-batches",
        lambda s: [{"size": n} for n in s.micro_batches if n < max(s.micro_batches)],
        _micro,
        decoder=True,
        gradients=True,
    ),
)

RELATIONS: Mapping[str, ModelRelation] = MappingProxyType({r.name: r for r in _ALL})
"""Every relation, by name."""


def not_promised(mode: str, relation: str, params: Params, attention: str) -> str:
    """Why a mode lets the bits of a case change; empty where it must not.

    Inside `isogemm.torch.invariant` the model is torch's: what torch adds up between its calls is in torch's order.
    """
    if mode != "invariant":
        return ""
    if relation == "micro-batches":
        return "micro-batches add up in .grad, another sum for every cut; convert has an order for it"
    if attention == "eager" and relation in ("left-padding", "decode") and params.get("pad"):
        return "with eager attention padding on the left moves keys in a contract's blocks; sdpa has no such limit"
    return ""
