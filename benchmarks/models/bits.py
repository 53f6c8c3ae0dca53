"""Logits and gradients that change in the audit's relations: after ``convert(strict=True)``, and in plain torch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .ledger import Case, Sizes
from .shapes import SHAPES, causal

__all__ = ["cases"]

USUAL = ("rerun", "population", "position", "neighbours", "left-padding", "right-padding", "prefill", "decode")
WAYS = ("eager", "captured", "compiled")
LARGE = "qwen3-0.6b"  # its gradients are gigabytes on the host; the part "train" has them


def cases(sizes: Sizes) -> Iterator[Case]:
    """What has to hold first, in the order of what it costs; then plain torch."""
    held: dict[tuple[str, str], Any] = {}
    for mode in ("convert", "plain"):
        for way in WAYS:
            for name in SHAPES:
                for relation in USUAL:
                    yield _case(held, sizes, name, mode, way, relation)
        for name in SHAPES:
            for relation in ("load", "micro-batches"):
                if (name, relation) != (LARGE, "micro-batches"):
                    yield _case(held, sizes, name, mode, "eager", relation)


def _case(held: dict[tuple[str, str], Any], sizes: Sizes, name: str, mode: str, way: str, relation: str) -> Case:
    def made() -> Mapping[str, Any]:
        return _facts(_evaluation(held, sizes, name, mode), name, mode, way, relation)

    return f"{name}, {mode}, {way}, {relation}", made


def _evaluation(held: dict[tuple[str, str], Any], sizes: Sizes, name: str, mode: str) -> Any:
    """Made once for a model and a mode; an error of converting it is that of each of its cases."""
    if (name, mode) not in held:
        try:
            held[name, mode] = _made(sizes, name, mode)
        except Exception as error:
            held[name, mode] = error
    if isinstance(held[name, mode], Exception):
        raise held[name, mode]
    return held[name, mode]


def _made(sizes: Sizes, name: str, mode: str) -> Any:
    import isogemm.torch
    from isogemm.audit.transformer.drift import Evaluation
    from isogemm.audit.transformer.relations import RELATIONS, ModelScope
    from isogemm.audit.transformer.runs import Prompts, prompt_length
    from isogemm.audit.transformer.subject import Subject

    model = causal(name, sizes)
    windowed, wanted = getattr(model.config, "sliding_window", None), 21 if sizes.tiny else 80
    if sizes.tiny:
        scope = ModelScope(prompt_length(wanted, model.config), (2, 3), (7, 16), (1, 2))
    elif windowed:  # keys fall out of the window, and of the cache
        scope = ModelScope(prompt_length(windowed + 64, model.config), (2, 7), (64, 200), (2, 4))
    else:
        scope = ModelScope(prompt_length(wanted, model.config), (2, 7, 32), micro_batches=(2, 4))
    tokens = 16 if sizes.tiny else 64
    drawn = Prompts.draw(scope.sequences, max(scope.length, tokens), model.config.vocab_size, sizes.seed)
    subject = Subject(mode, model, grad_order=f"leaf{tokens}")
    if mode == "convert":
        isogemm.torch.convert(subject.model, strict=True, grad_order=f"leaf{tokens}")  # refuses what was left
    found = Evaluation(subject, scope, Prompts(drawn.ids, scope.length), Prompts(drawn.ids, tokens))
    if mode == "plain":
        found.located |= set(RELATIONS)  # where it changes is not looked for
    return found


def _by(relation: Any, way: str) -> Any:
    """A relation whose second run is compiled or captured; the first is eager."""
    if way == "eager":
        return relation

    def runs(*given: Any) -> Any:
        first, second = relation.runs(*given)
        return first, second.by(way)

    return replace(relation, runs=runs, cuda=way == "captured")


def _some(scope: Any, way: str, params: Mapping[str, Any]) -> bool:
    """Whether a case is run: a graph has one shape, so no growing cache, and of compiled ones few."""
    few = params.get("batch", scope.batch) in (1, scope.batch) and params.get("pad") in (None, 0, 29)
    alone = params.get("batch") == 1 and len(params) > 1
    return way == "eager" or (params.get("cache") != "dynamic" and (way == "captured" or (few and not alone)))


def _facts(evaluation: Any, name: str, mode: str, way: str, relation: str) -> Mapping[str, Any]:
    """All cases of a relation together."""
    import torch

    from isogemm.audit.transformer.drift import ModelCase, evaluate
    from isogemm.audit.transformer.relations import RELATIONS

    torch._dynamo.config.recompile_limit = 64  # all shapes of a model
    known, outcomes = _by(RELATIONS[relation], way), []
    for params in known.cases(evaluation.scope):
        if _some(evaluation.scope, way, params):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes.append(evaluate(evaluation, known, ModelCase(mode, relation, params, name)))
    reasons = list(dict.fromkeys(o.reason for o in outcomes if o.reason))
    return {
        "model": name,
        "mode": mode,
        "way": way,
        "relation": relation,
        "tokens": evaluation.scope.length,
        "status": ", ".join(f"{n} {word}" for word, n in Counter(o.status for o in outcomes).items()),
        "outputs": sum(o.outputs for o in outcomes),
        "differing": sum(o.changed for o in outcomes),
        "reason": "; ".join(reasons) or None,
        "drift": next((str(o.drift) for o in outcomes if o.drift), None),
    }
