"""A training step of Qwen3-0.6B's widths: gradients over micro-batches, compiled and eager, and its time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isogemm.study.bits import differing

from .ledger import Case, Sizes, timed
from .shapes import causal

__all__ = ["cases"]

SEQUENCES, LAYERS = 8, 4
UNPADDED = {"full_attention": None}  # else compiled code has a table of [queries, keys], for rows that might be packed


class Trained:
    """One way to compute a step: a model, its loss, and where gradients end up."""

    def __init__(self, model: Any, ids: Any, *, converted: bool, main_grad: bool = False) -> None:
        import isogemm.torch

        self.model, self.ids, self.main_grad, self.converted = copy.deepcopy(model), ids, main_grad, converted
        if converted:
            isogemm.torch.convert(self.model, strict=True, grad_order=f"leaf{ids.shape[1]}")
        self.compiled: Any = None

    def loss(self, part: Any) -> Any:
        """A micro-batch's part of the step's loss: -log p(next token) over all tokens of the step."""
        import torch

        from isogemm.torch import reductions

        logits = self.model(part, use_cache=False, attention_mask=UNPADDED).logits
        following = torch.nn.functional.pad(part[:, 1:], (0, 1), value=-100)
        if self.converted:
            total = reductions.sum(reductions.cross_entropy(logits, following, out_dtype=torch.float32).flatten())
        else:  # as transformers has it
            rows, targets = logits.float().flatten(0, 1), following.flatten()
            total = torch.nn.functional.cross_entropy(rows, targets, reduction="sum")
        return total / (self.ids.shape[0] * (self.ids.shape[1] - 1))

    def fused(self, mode: str | None = None) -> Callable[[Any], Any]:
        """The loss by torch.compile, as one graph."""
        import torch

        if self.compiled is None:
            self.compiled = torch.compile(self.loss, fullgraph=True, dynamic=False, mode=mode)
        return self.compiled

    def step(self, loss: Callable[[Any], Any], sequences: int) -> None:
        """Gradients of all sequences, `sequences` at a time."""
        import torch

        import isogemm.torch

        self.model.zero_grad()
        if self.main_grad:
            isogemm.torch.use_main_grad(self.model)
        for part in self.ids.split(sequences):
            torch.compiler.cudagraph_mark_step_begin()
            loss(part).backward()
        if self.main_grad:
            isogemm.torch.collect_main_grad(self.model)

    def gradients(self, loss: Callable[[Any], Any], sequences: int) -> list[Any]:
        """Copies of a step's gradients."""
        self.step(loss, sequences)
        return [p.grad.clone() for p in self.model.parameters()]


def cases(sizes: Sizes) -> Iterator[Case]:
    """Bits first, eager before compiled; then times."""
    import torch
    from torch._inductor import config as inductor

    inductor.emulate_precision_casts = True  # a compiler that rounds where eager code does
    tokens = 16 if sizes.tiny else 512
    model = causal("qwen3-0.6b", sizes, num_hidden_layers=1 if sizes.tiny else LAYERS).train()
    generator = torch.Generator(sizes.device).manual_seed(sizes.seed)
    ids = torch.randint(model.config.vocab_size, (SEQUENCES, tokens), generator=generator, device=sizes.device)
    ways = {
        "isogemm, main_grad": Trained(model, ids, converted=True, main_grad=True),
        "isogemm": Trained(model, ids, converted=True),
        "torch": Trained(model, ids, converted=False),
    }
    kept: dict[str, list[Any]] = {}
    for name in ("isogemm, main_grad", "torch"):
        yield f"{name}, eager micro-batches", lambda name=name: _micro(ways[name], ways[name].loss, kept, name)
    for name in ("isogemm, main_grad", "isogemm", "torch"):
        yield f"{name}, compiled against eager", lambda name=name: _compiled(ways[name], kept, name)
    yield (
        "isogemm, main_grad, compiled micro-batches",
        lambda: _micro(ways["isogemm, main_grad"], ways["isogemm, main_grad"].fused(), {}, ""),
    )
    eager = {name: lambda way=way: way.step(way.loss, SEQUENCES) for name, way in ways.items()}
    yield "time of a step, eager", lambda: timed(sizes, eager, "torch")
    yield "time of a step, compiled", lambda: _compiled_times(sizes, ways, None)
    if sizes.device == "cuda":
        some = {name: ways[name] for name in ("isogemm", "torch")}  # a graph does not write to buffers of others
        yield "time of a step, compiled, CUDA graph", lambda: _compiled_times(sizes, some, "reduce-overhead")
        yield "isogemm, in CUDA graphs against eager", lambda: _compiled(ways["isogemm"], kept, "isogemm")


def _micro(way: Trained, loss: Callable[[Any], Any], kept: dict[str, list[Any]], name: str) -> Mapping[str, Any]:
    """Elements of all gradients that differ between the whole batch and micro-batches of 4, 2 and 1."""
    whole = kept[name] = way.gradients(loss, SEQUENCES)
    sizes = (2,) if way.compiled is not None else (4, 2, 1)
    counts = {f"differing in {n} at a time": _differing(whole, way.gradients(loss, n)) for n in sizes}
    return counts | {"differing": sum(counts.values()), "checked": len(sizes) * sum(x.numel() for x in whole)}


def _compiled_times(sizes: Sizes, ways: Mapping[str, Trained], mode: str | None) -> Mapping[str, Any]:
    """torch's own step by its compiler as it comes; isogemm's by one that rounds where eager code does."""
    import torch
    from torch._inductor import config as inductor

    torch._dynamo.reset()
    for name, way in ways.items():
        way.compiled = None
        with inductor.patch(emulate_precision_casts=name != "torch"):
            for _ in range(3):  # a graph is captured at the second
                way.step(way.fused(mode), SEQUENCES)
    return timed(sizes, {name: lambda way=way: way.step(way.fused(), SEQUENCES) for name, way in ways.items()}, "torch")


def _compiled(way: Trained, kept: dict[str, list[Any]], name: str) -> Mapping[str, Any]:
    want = kept[name] if name in kept else way.gradients(way.loss, SEQUENCES)
    got = way.gradients(way.fused(), SEQUENCES)
    return {"differing": _differing(want, got), "checked": sum(x.numel() for x in want)}


def _differing(x: list[Any], y: list[Any]) -> int:
    return sum(differing(a, b) for a, b in zip(x, y, strict=True))
