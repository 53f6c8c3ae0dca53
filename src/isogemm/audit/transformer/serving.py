"""A model under load: prompts as requests of transformers' continuous batching, and the logits of one of them.

The first prompt is the one that is looked at. The others are cut to lengths of their own, so that they end, and others
begin, while it is computed: in chunks with a share of each call, over pages of a cache, and then token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import OptionError
from ..bench import NotApplicable
from ..data import Array

GENERATED = 6
"""Tokens that each request generates, greedily."""

_BLOCK, _CALL = 16, 24  # tokens of a page of the cache, and of a call of the model at most
_LOOKED_AT, _PATIENCE = "looked-at", 600.0  # the request's id; seconds in which all have to be there


def served(model: Any, ids: Array) -> list[tuple[Array, Any]]:
    """(positions, logits) of the first prompt's tokens, and of those that are generated behind it, call by call.

    Raises NotApplicable: there is no continuous batching for the model. Raises OptionError: a request failed, or has no
    answer.
    """
    import transformers

    if not hasattr(model, "continuous_batching_context_manager"):
        raise NotApplicable("needs a model of a transformers that has continuous batching")
    if not model._can_set_attn_implementation():  # transformers warns, and computes requests without their pages
        raise NotApplicable(f"{type(model).__name__} computes attention by its own code, which reads no pages")
    rows = [_LOOKED_AT, *(f"beside {i}" for i in range(1, len(ids)))]
    lengths = [ids.shape[1], *(1 + (11 * i) % ids.shape[1] for i in range(1, len(ids)))]
    pages = sum(-(-(n + GENERATED) // _BLOCK) for n in lengths) + len(ids)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [""]
    pages *= len(kinds) if len(set(kinds)) > 1 else 1  # layers of each kind take pages of their own
    settings = transformers.ContinuousBatchingConfig(block_size=_BLOCK, num_blocks=pages, max_batch_tokens=_CALL)
    greedy = transformers.GenerationConfig(max_new_tokens=GENERATED, do_sample=False, eos_token_id=-1)
    found: list[tuple[Array, Any]] = []
    with (
        model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, warmup=False
        ) as manager,
        _watched(model, manager, found),
    ):
        for i in np.roll(np.arange(len(ids)), len(ids) // 2):  # some before it, some behind it
            manager.add_request(ids[i, : lengths[i]].tolist(), request_id=rows[i], max_new_tokens=GENERATED)
        _wait(manager, set(rows))
    return found


@contextmanager
def _watched(model: Any, manager: Any, found: list[tuple[Array, Any]]) -> Iterator[None]:
    """Keep the logits of the request that is looked at; the model computes those of all tokens, not of the last."""

    def keep(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        ends = options["cu_seq_lens_q"].tolist()
        requests = manager.batch_processor.inputs_and_outputs.requests_in_batch
        for request, i, j in zip(requests, ends, ends[1:], strict=False):
            if request.state.request_id == _LOOKED_AT:
                positions = options["position_ids"][0, i:j].cpu().numpy().copy()
                found.append((positions, output.logits[0, i:j].detach().cpu().clone()))

    model._supports_logits_to_keep = lambda: False
    hook = model.register_forward_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        del model._supports_logits_to_keep


def _wait(manager: Any, left: set[str]) -> None:
    """Until every request is answered."""
    waited, nearest = 0.0, "the other relations of the audit"
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            waited += 1
            if not manager.is_running() or waited > _PATIENCE:
                raise OptionError("requests", limit="an answer to each", value=sorted(left), nearest=nearest)
        elif result.is_finished():
            if result.error:
                raise OptionError("a request", limit="an answer", value=result.error, nearest=nearest)
            left.discard(result.request_id)
