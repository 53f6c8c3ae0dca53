"""Logits and gradients that change in the audit's relations: after ``convert(strict=True)``, and in plain torch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from .ledger import Case, Sizes
from .shapes import SHAPES, causal

__all__ = ["cases"]

FIRST = "qwen3-0.6b"
USUAL = (
    *("rerun", "population", "position", "neighbours", "left-padding", "right-padding", "prefill", "decode"),
    "captured",
)


def cases(sizes: Sizes) -> Iterator[Case]:
    """What has to hold first, in the order of what it costs; then plain torch."""
    held: dict[tuple[str, str], Any] = {}
    names = list(SHAPES)
    for mode in ("convert", "plain"):
        for name in names:
            for relation in USUAL:
                yield _case(held, sizes, name, mode, relation)
        for name in [*(n for n in names if n != FIRST), *([FIRST] if mode == "convert" or sizes.tiny else [])]:
            for relation in ("micro-batches", "load", "compiled"):
                if (name, relation) != (FIRST, "micro-batches"):  # gigabytes on the host; the part "train" has them
                    yield _case(held, sizes, name, mode, relation)


def _case(held: dict[tuple[str, str], Any], sizes: Sizes, name: str, mode: str, relation: str) -> Case:
    return f"{name}, {mode}, {relation}", lambda: _facts(_evaluation(held, sizes, name, mode), name, mode, relation)


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
    windowed, wanted = getattr(model.config, "sliding_window", None), 21 if sizes.tiny else 67
    scope = ModelScope(prompt_length(wanted, model.config), (2, 3) if sizes.tiny else (2, 7, 32))
    if sizes.tiny:
        scope = ModelScope(scope.length, scope.batches, (7, 16), (1, 2))
    elif windowed:  # keys fall out of the window, and of the cache
        scope = ModelScope(prompt_length(windowed + 19, model.config), (2, 7), (64, 200))
    tokens = 16 if sizes.tiny else 64
    drawn = Prompts.draw(scope.sequences, max(scope.length, tokens), model.config.vocab_size, sizes.seed)
    subject = Subject(mode, model, grad_order=f"leaf{tokens}")
    if mode == "convert":
        isogemm.torch.convert(subject.model, strict=True, grad_order=f"leaf{tokens}")  # refuses what was left
    found = Evaluation(subject, scope, Prompts(drawn.ids, scope.length), Prompts(drawn.ids, tokens))
    if mode == "plain":
        found.located |= set(RELATIONS)  # where it changes is not looked for
    return found


def _facts(evaluation: Any, name: str, mode: str, relation: str) -> Mapping[str, Any]:
    """All cases of a relation together."""
    import torch

    from isogemm.audit.transformer.drift import ModelCase, evaluate
    from isogemm.audit.transformer.relations import RELATIONS

    known, outcomes = RELATIONS[relation], []
    if relation == "compiled":
        torch._dynamo.reset()  # its limit of recompilations is for all models together
    windowed = getattr(evaluation.subject.model.config, "sliding_window", None)
    for params in known.cases(evaluation.scope):
        if windowed and relation == "compiled" and params["cache"] == "static":
            continue  # transformers' cache of a window counts on the host: another graph for each token
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.append(evaluate(evaluation, known, ModelCase(mode, relation, params, name)))
    reasons = list(dict.fromkeys(o.reason for o in outcomes if o.reason))
    return {
        "model": name,
        "mode": mode,
        "relation": relation,
        "tokens": evaluation.scope.length,
        "status": ", ".join(f"{n} {word}" for word, n in Counter(o.status for o in outcomes).items()),
        "outputs": sum(o.outputs for o in outcomes),
        "differing": sum(o.changed for o in outcomes),
        "reason": "; ".join(reasons) or None,
        "drift": next((str(o.drift) for o in outcomes if o.drift), None),
    }
