"""Continuous batching of drawn requests: each beside others and alone, logits and tokens, and tokens per second."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from isogemm.lab import relative_speed
from isogemm.study.bits import differing

from .ledger import Case, Sizes, synchronize
from .shapes import causal

__all__ = ["cases"]

LAYERS, CALL, BLOCK = 4, 512, 16  # of the model; tokens of a call, and of a page of the cache


class Served:
    """A model, and the logits behind each token that it generates while it serves."""

    def __init__(self, model: Any, sizes: Sizes, generated: int) -> None:
        self.model, self.sizes, self.generated = model, sizes, generated

    def serve(self, prompts: list[list[int]], *, together: bool, logits: bool) -> tuple[list[Any], float]:
        """(tokens, logits or None) of each request, and seconds; one after the other unless `together`."""
        import transformers

        pages = sum(-(-(len(p) + self.generated) // BLOCK) for p in prompts) + len(prompts)
        options = {"num_blocks": pages, "max_batch_tokens": CALL, "max_requests_per_batch": len(prompts)}
        options |= {"allow_block_sharing": False, "use_cuda_graph": False, "use_async_batching": False}
        settings = transformers.ContinuousBatchingConfig(block_size=BLOCK, **options)
        greedy = transformers.GenerationConfig(max_new_tokens=self.generated, do_sample=False, eos_token_id=-1)
        found: dict[str, list[Any]] = {str(i): [] for i in range(len(prompts))}
        tokens: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, warmup=False
        ) as manager:
            hook = self._watch(manager, found) if logits else None
            try:
                synchronize(self.sizes)
                begin = time.perf_counter()
                for group in [range(len(prompts))] if together else [[i] for i in range(len(prompts))]:
                    for i in group:
                        manager.add_request(prompts[i], request_id=str(i), max_new_tokens=self.generated)
                    self._wait(manager, tokens, {str(i) for i in group})
                seconds = time.perf_counter() - begin
            finally:
                if hook is not None:
                    hook.remove()
                    del self.model._supports_logits_to_keep
        return [(tokens[name], found[name]) for name in found], seconds

    def _watch(self, manager: Any, found: dict[str, list[Any]]) -> Any:
        """Keep the last logits of a request's share of a call, unless its prompt goes on in the next one."""

        def keep(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
            ends = options["cu_seq_lens_q"].tolist()
            last = options["position_ids"][0].tolist()
            requests = manager.batch_processor.inputs_and_outputs.requests_in_batch
            for request, i, j in zip(requests, ends, ends[1:], strict=False):
                state = request.state
                if i < j and last[j - 1] + 1 >= len(state.initial_tokens):
                    found[state.request_id].append(output.logits[0, j - 1].detach().clone())

        self.model._supports_logits_to_keep = lambda: False
        return self.model.register_forward_hook(keep, with_kwargs=True)

    def _wait(self, manager: Any, tokens: dict[str, list[int]], left: set[str]) -> None:
        while left:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError(f"the server stopped with {len(left)} requests unanswered")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(str(result.error))
                tokens[result.request_id] = list(result.generated_tokens)
                left.discard(result.request_id)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Bits of isogemm, throughput, and what plain torch changes."""
    import isogemm.torch

    count, generated, longest = (6, 4, 40) if sizes.tiny else (256, 16, 256)
    rng = np.random.default_rng(sizes.seed)
    plain = causal("qwen3-0.6b", sizes, num_hidden_layers=1 if sizes.tiny else LAYERS)
    ours = copy.deepcopy(plain)
    isogemm.torch.convert(ours, strict=True)
    lengths = rng.integers(2, longest, count)
    prompts = [rng.integers(1, plain.config.vocab_size - 1, n).tolist() for n in lengths]
    ways = {"isogemm": Served(ours, sizes, generated), "torch": Served(plain, sizes, generated)}
    bits = {name: lambda way=way: _bits(way, prompts) for name, way in ways.items()}
    yield "isogemm, requests beside others and alone", bits["isogemm"]
    yield "throughput", lambda: _throughput(ways, prompts, 1 if sizes.tiny else 6)
    yield "torch, requests beside others and alone", bits["torch"]


def _bits(way: Served, prompts: list[list[int]]) -> Mapping[str, Any]:
    """All requests at once, and one after the other; logits are compared as long as the tokens before are the same."""
    together, _ = way.serve(prompts, together=True, logits=True)
    alone, _ = way.serve(prompts, together=False, logits=True)
    facts = {"requests": len(prompts), "texts changed": 0, "differing": 0, "checked": 0, "tokens compared": 0}
    for (tokens, rows), (want, wanted) in zip(together, alone, strict=True):
        facts["texts changed"] += tokens != want
        same = next((i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b), len(want) - 1) + 1
        if len(rows) != len(tokens) or len(wanted) != len(want):
            raise RuntimeError(f"{len(rows)} and {len(wanted)} rows of logits of {len(tokens)} tokens")
        for x, y in zip(rows[:same], wanted[:same], strict=True):
            facts["differing"] += differing(x, y)
            facts["checked"] += x.numel()
            facts["tokens compared"] += 1
    return facts


def _throughput(ways: Mapping[str, Served], prompts: list[list[int]], rounds: int) -> Mapping[str, Any]:
    """Tokens generated in a second, in turns that turn round; the first one of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name in sorted(ways, reverse=i % 2 == 1):
            took = ways[name].serve(prompts, together=True, logits=False)[1]
            if i:
                seconds[name].append(took)
    rates = {name: len(prompts) * ways[name].generated / float(np.median(took)) for name, took in seconds.items()}
    facts = {f"tokens per second, {name}": rate for name, rate in rates.items()}
    return facts | {"ratio": relative_speed(seconds["isogemm"], seconds["torch"]), "samples": seconds}
