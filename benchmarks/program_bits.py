"""The bits of a training step over every choice of its plan: ``python -m benchmarks.program_bits``.

A decoder of Qwen3's shape takes ten steps by plans that differ in all that may be chosen: threads, micro-batches, mode,
recomputation, and tiles, threads and groups of leaves that are drawn and that no planner would choose. Every loss,
every gradient of the last step, every weight and all of the optimizer's state are compared with those of one thread,
and at each step every gradient and weight with `isogemm.torch.convert` and AdamW's formula. Exits with 1 where a bit
differs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer

from isogemm.base.progress import progress_bar
from isogemm.contract.compare import differing
from isogemm.lab import environment, write_json
from isogemm.program import AdamW, Choices, DecoderConfig, Program, lower
from isogemm.program.executor import scalars

from .common import Out, cpu_name, line_console, repeated, results_path
from .program import peer_of, weights_of

MODEL = DecoderConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64,
)  # fmt: skip
RATES = AdamW(lr=1e-3)
THREADS, MICRO_BATCHES, MODES, RECOMPUTE = (1, 2, 3, 12), (1, 2, 4, 8), ("deterministic", "fast"), (False, True)
TREE = ("dw.L0.wq", "dw.L1.down", "dw.head")  # gradients whose leaves are drawn to be side by side

State = dict[str, Any]


def drawn_choices(made: Program, draw: random.Random, threads: int) -> Choices:
    """Tiles, threads and groups of leaves for half of a program's calls, whatever they cost."""
    dispatch = {}
    for call, op in zip(made.lowered.calls, made.plan["ops"], strict=True):
        whole = op["isogemm"]["kernel"].get("strategy") in ("gemv", "stream") or call.axis == "none"
        if not whole and draw.random() < 0.5:
            tiles = {f"tile_{x}": draw.randint(1, op["shape"][x]) for x in "mn"}
            dispatch[op["name"]] = tiles | {"threads": draw.randint(1, threads)}
    groups = {name: draw.randint(1, made.plan["isogemm"]["batch"]) for name in TREE}
    return Choices(threads, "deterministic", groups, dispatch)


def adamw(w: Any, g: Any, m: Any, v: Any, s: Any) -> tuple[Any, Any, Any]:
    """The formula of `isogemm.program.executor.scalars`, an operation of float32 at a time."""
    decay, b1, c1, b2, c2, root, eps, rate = s
    m, v = m * b1 + g * c1, v * b2 + (g * g) * c2
    return w * decay - rate * (m / (np.sqrt(v) / root + eps)), m, v


def plans(batch: int, tokens: int, drawn: int, seed: int) -> Iterator[tuple[dict[str, Any], Program]]:
    """What was chosen, and the program; one thread, one batch and no choices first."""
    for threads, parts, mode, again in product(THREADS, MICRO_BATCHES, MODES, RECOMPUTE):
        chosen: dict[str, Any] = {"threads": threads, "micro_batches": parts, "mode": mode, "recompute": again}
        yield chosen, lower(MODEL, batch=batch, tokens=tokens, leaf=tokens, **chosen)
    plain = lower(MODEL, batch=batch, tokens=tokens, leaf=tokens, threads=5)
    for i in range(drawn):
        choices = drawn_choices(plain, random.Random(f"{seed} {i}"), 5)
        yield (
            {"drawn": i, "operations": len(choices.dispatch), "groups": dict(choices.groups)},
            lower(MODEL, batch=batch, tokens=tokens, leaf=tokens, threads=5, choices=choices),
        )


def trained(made: Program, given: Mapping[str, Any], ids: Any) -> State:
    """Losses of all steps, and gradients, weights and the optimizer's state after the last."""
    run = made.start(given)
    losses = np.array([run.step(*step, RATES) for step in ids], np.float32)
    kept = [v.name for v in made.graph.values.values() if v.section in ("weights", "grad_weights", "optimizer")]
    return {"losses": losses} | {name: run.array(name).copy() for name in kept}


def against_torch(given: Mapping[str, Any], ids: Any) -> dict[str, int]:
    """Elements of gradients and weights, step by step, with another bit than the converted model's."""
    import torch

    from isogemm.torch import reductions

    steps, _, batch, tokens = ids.shape
    peer = peer_of(MODEL, given, convert=True, leaf=tokens)
    angles = {"inv_freq": peer.model.rotary_emb.inv_freq.numpy()}  # torch's powers have bits of their own
    run = lower(MODEL, batch=batch, tokens=tokens, leaf=tokens).start({**given, **angles})
    parameters, known = dict(peer.named_parameters()), {name: key for name, key, _ in MODEL.weights()}
    state = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in given.items()}
    found = {"checked": 0, "differing": 0}
    for step in range(steps):
        some, wanted = (torch.from_numpy(x) for x in ids[step])
        peer.zero_grad()
        log_p = reductions.log_softmax(peer(some, use_cache=False).logits)
        (-log_p.gather(-1, wanted[..., None]).sum() / wanted.numel()).backward()
        run.step(*ids[step], RATES)
        for name, key in known.items():
            p = parameters[key]
            g = p.grad.numpy()
            w, *state[key] = adamw(p.detach().numpy(), g, *state[key], scalars(RATES, step + 1))
            p.data.copy_(torch.from_numpy(w))
            for ours, theirs in ((run.array(f"dw.{name}"), g), (run.array(name), w)):
                found["checked"] += ours.size
                found["differing"] += differing(ours, theirs)
    return found


def main(
    batch: Annotated[int, typer.Option(help="Sequences of a step, a multiple of 8.", min=8)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each, and rows of a leaf.", min=1)] = 64,
    steps: Annotated[int, typer.Option(help="Of training.", min=1)] = 10,
    drawn: Annotated[int, typer.Option(help="Plans that are drawn.", min=0)] = 32,
    json: Out = None,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and plans.", min=0)] = 0,
) -> None:
    """Train by every choice, compare all bits, and write a row for each."""
    ids = np.random.default_rng(seed + 1).integers(0, MODEL.vocab_size, (steps, 2, batch, tokens))
    given, rows, wanted = weights_of(MODEL, seed), [], None
    stamp, console = environment(), line_console(160)
    count = len(THREADS) * len(MICRO_BATCHES) * len(MODES) * len(RECOMPUTE) + drawn
    converted = against_torch(given, ids)
    with progress_bar() as tell:
        for i, (chosen, made) in enumerate(plans(batch, tokens, drawn, seed)):
            tell(i, count, str(chosen))
            made.check()
            begin = time.perf_counter()
            found = trained(made, given, ids)
            seconds = time.perf_counter() - begin
            wanted = wanted or found
            wrong = {name: n for name, x in wanted.items() if (n := differing(found[name], x))}
            checked = sum(x.size for x in wanted.values())
            rows.append({"name": "train", "chosen": chosen, "checked": checked, "differing": wrong, "seconds": seconds})
    rows.append({"name": "isogemm.torch.convert and AdamW, every step", **converted})
    path = json or results_path("program-bits", cpu_name(stamp))
    words = ["--batch", str(batch), "--tokens", str(tokens), "--steps", str(steps), "--drawn", str(drawn)]
    facts = {"command": repeated("program_bits", words, seed=seed), "model": MODEL.to_dict(), "steps": steps}
    write_json(path, rows, environment=stamp, benchmark="program-bits", **facts)
    bad = [row for row in rows if row["differing"]]
    plain = [row for row in rows if row["name"] == "train"]
    elements = sum(row["checked"] for row in plain)
    console.print(f"{len(plain)} plans, {steps} steps: {elements:,} elements compared, in {len(bad)} rows some differ")
    console.print(f"against isogemm.torch: {converted['differing']:,} of {converted['checked']:,} elements differ")
    console.print(f"rows: {path}", soft_wrap=True)
    for row in bad:
        console.print(str(row))
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
