"""A converted model cut between ranks, as the plan that transformers ships with it says."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ...errors import OptionError
from ..model.layers import Embedding, Linear
from .layers import ColumnParallel, HeadNorm, Parallel, ParallelLinear, RowParallel, VocabularyEmbedding
from .ranks import Ranks, as_ranks

# transformers' words for how a module is cut, and whether every rank gets all of its outputs.
STYLES: dict[str, tuple[type[Parallel], bool]] = {
    "colwise": (ColumnParallel, False),
    "colwise_gather_output": (ColumnParallel, True),
    "rowwise": (RowParallel, False),
    "embedding_rowwise": (VocabularyEmbedding, False),
    "replicated_with_grad_allreduce": (HeadNorm, False),
}


def plan_of(model: Any) -> dict[str, str]:
    """The patterns of modules' names and their styles that a transformers model carries; else an OptionError."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise OptionError(
            f"tensor parallelism of {type(model).__name__}", limit="a transformers model with a tp_plan",
            value="no plan", nearest="isogemm.torch.distributed.ColumnParallel.adopt, layer by layer",
        )  # fmt: skip
    return dict(plan)


def cut(model: Any, tp: Any) -> dict[str, str]:
    """`parallelise` by the model's own plan."""
    return parallelise(model, plan_of(model), as_ranks(tp))


def parallelise(model: Any, plan: Mapping[str, str], ranks: Ranks) -> dict[str, str]:
    """Cut the layers of a converted model between ranks, in place, or change nothing and say why.

    A table that shares its weight with an output layer is cut as that is. Heads are whole: attention then needs no word
    of its own, since a head sees its own queries, keys and values.

    Parameters
    ----------
    model : torch.nn.Module
        What `isogemm.torch.convert` left.
    plan : mapping of str to str
        Patterns of modules' names, and keys of `STYLES`.
    ranks : Ranks

    Returns
    -------
    dict of str to str
        Names of the modules that are cut, and their styles.

    Raises
    ------
    OptionError
        A style that is not known, a module that `convert` left, heads that the ranks do not divide, or a model that is
        cut already.
    ShapeError
        A dimension that the tree's leaves or the ranks do not divide.
    """
    named = [(name, child) for name, child in model.named_modules() if not hasattr(child, "tp_plan")]
    found = {name: style for name, child in named if (style := _style(name, plan)) is not None}
    modules = dict(named)
    heads = {id(modules[name].weight) for name in found if isinstance(modules[name], Linear)}
    for name, child in named:
        if isinstance(child, Embedding) and id(child.weight) in heads:
            found[name] = "embedding_rowwise"
    check_heads(getattr(model, "config", None), ranks.size)
    for name, style in found.items():
        _check(name, modules[name], style, ranks)
    done: set[int] = set()
    for name, style in found.items():
        kind, gathered = STYLES[style]
        kind.adopt(modules[name], ranks, name, done)
        if isinstance(modules[name], ColumnParallel):
            modules[name].gathered = gathered
    return found


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _check(name: str, layer: Any, style: str, ranks: Ranks) -> None:
    """Raise unless a layer can be cut in that style."""
    if style not in STYLES:
        raise OptionError(f"style of {name}", limit=" or ".join(STYLES), value=style, nearest="colwise")
    kind = STYLES[style][0]
    if isinstance(layer, Parallel):
        raise OptionError(name, limit="a model that is not cut yet", value=type(layer).__name__, nearest="a new model")
    if issubclass(kind, ParallelLinear) and type(layer) is not Linear:
        raise OptionError(
            f"{name}, which the plan cuts", limit="isogemm.torch.Linear", value=type(layer).__name__,
            nearest="convert(model, tp=...) without leave= and quantize=",
        )  # fmt: skip
    kind.parts(layer, ranks, name)


def check_heads(config: Any, ranks: int) -> None:
    """Raise OptionError unless so many ranks can share the heads of a configuration, if it or its text's has any."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            most = max(n for n in range(1, ranks + 1) if heads % n == 0)
            limit, nearest = f"a multiple of {ranks} ranks", f"{most} ranks"
            raise OptionError(f"{key} of the model", limit=limit, value=heads, nearest=nearest)
