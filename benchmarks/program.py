"""A training step by its plan against the same step by isogemm.torch and by torch: ``python -m benchmarks.program``.

All are float32 on the CPU and start from the same weights: a decoder by `isogemm.program`, and transformers' model with
torch's AdamW, converted by `isogemm.torch` and plain. Every round times each once, so what other programs take away
falls on all of them, and only ratios are held against bars. On a machine that is busy torch's threads wait for each
other by spinning, and lose more than ours: set OMP_WAIT_POLICY=passive, which the stamp names, or count CPU time of
one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from isogemm.base.progress import progress_bar
from isogemm.contract.compare import differing
from isogemm.lab import (
    WALL,
    Candidate,
    CpuClock,
    Work,
    environment,
    interleave,
    limit_threads,
    row,
    verdict,
    write_json,
)
from isogemm.program import AdamW, DecoderConfig, Program, lower
from isogemm.program.executor import CANARIES

from .common import (
    Bar,
    Out,
    Row,
    check_peers,
    cpu_name,
    line_console,
    ratio_text,
    repeated,
    results_path,
    sources_text,
    told,
    wrapped,
)

MODEL = DecoderConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64,
)  # fmt: skip
OURS, CONVERTED, PLAIN = "program", "isogemm.torch", "torch"
BARS = (Bar(CONVERTED, 1 / 1.05), Bar(PLAIN, 1.0))
MEMORY_BAR, CANARY_BAR = 1.15, 0.01  # of the bytes that live at once, and of a step's time
TIMED = 9  # steps of which each operation is timed
RATE = 1e-6  # of AdamW, so small that the numbers stay those of a first step

Step = Callable[[], object]


def weights_of(model: DecoderConfig, seed: int) -> dict[str, Any]:
    """Random ones, by their names in a checkpoint."""
    draw = np.random.default_rng(seed)
    return {
        key: 0.02 * draw.standard_normal(shape, np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
        for _, key, shape in model.weights()
    }


def peer_of(model: DecoderConfig, weights: Mapping[str, Any], *, convert: bool, leaf: int = 4096) -> Any:
    """transformers' model with the weights; converted, its gradients have the program's bits."""
    import torch
    import transformers

    import isogemm.torch

    sizes = {name: x for name, x in model.to_dict().items() if name not in ("head_norms", "rope_theta")}
    config = transformers.Qwen3Config(**sizes, max_position_embeddings=4096)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.load_state_dict({key: torch.from_numpy(x.copy()) for key, x in weights.items()}, strict=False)
    if convert:
        isogemm.torch.convert(made, grad_order=f"leaf{leaf}")
    return made


def peer_step(peer: Any, ids: Any, targets: Any, *, converted: bool) -> Step:
    """Forward, backward and AdamW."""
    import torch

    from isogemm.torch import reductions

    optimizer = torch.optim.AdamW(peer.parameters(), lr=RATE, fused=True)  # the fastest that torch has on a CPU
    given, wanted = torch.from_numpy(ids), torch.from_numpy(targets)

    def step() -> None:
        optimizer.zero_grad()
        logits = peer(given, use_cache=False).logits
        if converted:
            log_p = reductions.log_softmax(logits)
            loss = -log_p.gather(-1, wanted[..., None]).sum() / wanted.numel()
        else:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()

    return step


def measure(
    model: DecoderConfig, batch: int, tokens: int, threads: int, *, blocks: int, seed: int, report: Any, command: str,
    cpu_time: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The row of a training step."""
    draw = np.random.default_rng(seed + 1)
    ids, targets = draw.integers(0, model.vocab_size, (2, batch, tokens))
    weights, rates = weights_of(model, seed), AdamW(lr=RATE)
    peers = {name: peer_of(model, weights, convert=name == CONVERTED) for name in (CONVERTED, PLAIN)}
    given = weights | {"inv_freq": peers[PLAIN].model.rotary_emb.inv_freq.numpy()}
    made = lower(model, batch=batch, tokens=tokens, threads=threads)
    ours = made.start(given)
    steps: dict[str, Step] = {OURS: lambda: ours.step(ids, targets, rates)}
    steps |= {name: peer_step(peer, ids, targets, converted=name == CONVERTED) for name, peer in peers.items()}
    for name in (OURS, CONVERTED):
        steps[name]()
    correctness = compared(made, ours, peers[CONVERTED])
    candidates = [Candidate(name, lambda i, step=step: step()) for name, step in steps.items()]
    clock = CpuClock() if cpu_time else WALL
    timings = interleave(candidates, blocks=blocks, pause=0.05, progress=report, clock=clock)
    verdicts = [verdict(timings[OURS], timings[name]) for name in (CONVERTED, PLAIN)]
    shares, flops = phases(ours, steps[OURS]), sum(call.flops for call in made.lowered.calls)
    return row(
        f"train batch={batch} tokens={tokens}", command=command, timings=timings, verdicts=verdicts,
        kernel=made.plan["schema"], correctness=correctness, work=Work(flops, made.layout["bytes"]), seed=seed,
        threads=threads, clock="cpu" if cpu_time else "wall", model=model.to_dict(), batch=batch, tokens=tokens,
        operations=len(made.plan["ops"]),
        memory={name: made.layout[name] for name in ("bytes", "lower_bound")},
        phases=shares, bars=judged(made, verdicts, shares),
    )  # fmt: skip


def compared(made: Program, run: Any, peer: Any) -> dict[str, Any]:
    """Elements of all gradients of a first step with another bit than isogemm.torch's."""
    found = dict(peer.named_parameters())
    pairs = [(run.array(f"dw.{name}"), found[key].grad.numpy()) for name, key, _ in made.model.weights()]
    checked, wrong = sum(x.size for x, _ in pairs), sum(differing(*pair) for pair in pairs)
    return {"contract": "fma/chain", "checked": checked, "differing": wrong}


def phases(run: Any, step: Step) -> dict[str, float]:
    """Seconds of each phase in a step, layers together, and of all canaries: medians over some steps."""
    found: dict[str, list[float]] = {}
    for _ in range(TIMED):
        run.executor.times = []
        step()
        sums: dict[str, float] = {}
        for name, phase, begin, end in run.executor.times:
            word = CANARIES if name == CANARIES else phase.partition(".")[0]
            sums[word] = sums.get(word, 0.0) + end - begin
        for word, seconds in sums.items():
            found.setdefault(word, []).append(seconds)
    run.executor.times = None
    return {word: float(np.median(some)) for word, some in found.items()}


def judged(made: Program, verdicts: Sequence[Any], shares: Mapping[str, float]) -> list[dict[str, Any]]:
    """The bars of times, memory and canaries."""
    found = [
        {"bar": str(bar), "result": v.against(bar.value)} for bar in BARS for v in verdicts if v.peer == bar.against
    ]
    memory = made.layout["bytes"] / made.layout["lower_bound"]
    canaries = shares[CANARIES] / sum(shares.values())
    for ratio, bar, what in ((memory, MEMORY_BAR, "live bytes"), (canaries, CANARY_BAR, "a step is canaries")):
        found.append({"bar": f"≤ {bar:g} of {what}", "value": ratio, "result": "MET" if ratio <= bar else "NOT MET"})
    return found


def table(rows: Sequence[Row]) -> Table:
    """One line a candidate, and one a bar that is not of speed."""
    result = Table(title="medians; speeds of the program against each, 95 % intervals", title_justify="left")
    for name in ("case", "threads", "candidate", "ms", "program /", "bar"):
        result.add_column(name, no_wrap=True)
    for found in rows:
        head = found["name"], str(found["threads"])
        against, bars = (
            {x["peer"]: x for x in found["verdicts"]},
            {x["bar"].split(" ", 2)[2]: x for x in found["bars"]},
        )
        for name, timing in found["timings"].items():
            ratio = ratio_text(against[name], 3) if name in against else ""
            bar = f"{bars[name]['bar']}: {bars[name]['result'].lower()}" if name in bars else ""
            result.add_row(*head, name, f"{1e3 * timing['median']:.1f}", ratio, bar)
        for bar in found["bars"]:
            if "value" in bar:
                result.add_row(*head, "", "", f"{bar['value']:.4f}", f"{bar['bar']}: {bar['result'].lower()}")
        correct = found["correctness"]
        result.add_row(*head, "gradients", "", f"{correct['differing']} of {correct['checked']} differ", "")
    return result


def program_section(runs: Sequence[Row], sources: Sequence[str]) -> str:
    """The text of docs/performance.md between its marks, from committed results."""
    cpu, packages = (runs[0]["environment"][name] for name in ("cpu", "packages"))
    out = [
        *wrapped(
            "A training step of a decoder (hidden 512, 4 layers, float32, AdamW), as a program and by torch "
            f"{packages['torch']} (its AdamW fused), interleaved, {cpu['model']} ({cpu['core']}); above 1 the program "
            "is faster. Medians of rounds and 95 % intervals, and the least round of each. torch's threads spin while "
            "they wait, or with OMP_WAIT_POLICY=passive sleep."
        ),
        "",
        f"| threads | wait | rounds, load | program | / {CONVERTED} | / {PLAIN} | least of each | memory | canaries |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for stamp, found in ((run["environment"], found) for run in runs for found in run["rows"]):
        ratios = {x["peer"]: ratio_text(x) for x in found["verdicts"]}
        shares, memory, samples = found["phases"], found["memory"], found["timings"][OURS]["samples"]
        least = ", ".join(f"{1e3 * min(x['samples']):.0f}" for x in found["timings"].values())
        wait = stamp["variables"].get("OMP_WAIT_POLICY", "active")
        cells = [
            str(found["threads"]), wait, f"{len(samples)}, {stamp['load']}",
            f"{1e3 * found['timings'][OURS]['median']:.0f} ms", ratios[CONVERTED], ratios[PLAIN], f"{least} ms",
            f"{memory['bytes'] / memory['lower_bound']:.4f} of live bytes",
            f"{shares[CANARIES] / sum(shares.values()):.2%}",
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    bits = [found["correctness"] for run in runs for found in run["rows"]]
    differing, checked = (sum(x[name] for x in bits) for name in ("differing", "checked"))
    text = f"Of {checked:,} elements of gradients compared with {CONVERTED}'s, {differing} differed. From"
    return "\n".join([*out, "", text, *sources_text(sources), ""])


def main(
    threads: Annotated[int, typer.Option(help="For all.", min=1)] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each.", min=1)] = 64,
    divide: Annotated[int, typer.Option(help="Divide the model's extents by this, for a try.", min=1, max=8)] = 1,
    blocks: Annotated[int, typer.Option(help="Rounds; fewer than 5 decide nothing.", min=1)] = 21,
    cpu_time: Annotated[bool, typer.Option(help="Count CPU time: for 1 thread, on a machine that is busy.")] = False,
    json: Out = None,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.", min=0)] = 0,
) -> None:
    """Time a step in interleaved rounds, check the bits of its gradients, and hold it against the bars.

    Exits with 1 when a bit differed. A bar that was not met is a result, not a failure.
    """
    if cpu_time and threads != 1:
        raise typer.BadParameter("waiting threads spin, so CPU time says nothing of several", param_hint="--cpu-time")
    check_peers()
    parts = {name: getattr(MODEL, name) // divide for name in ("vocab_size", "hidden_size", "intermediate_size")}
    words = told(threads=threads, batch=batch, tokens=tokens, divide=divide if divide > 1 else 0, blocks=blocks)
    command = repeated("program", [*words, *["--cpu-time"] * cpu_time], seed=seed)
    stamp = environment()
    with limit_threads(threads), progress_bar() as tell:
        found = measure(
            replace(MODEL, **parts),
            batch,
            tokens,
            threads,
            blocks=blocks,
            seed=seed,
            report=tell,
            command=command,
            cpu_time=cpu_time,
        )
    path = json or results_path("program", cpu_name(stamp))
    write_json(path, [found], environment=stamp, benchmark="program")
    console = line_console(160)
    console.print(table([found]))
    console.print(f"rows: {path}", soft_wrap=True)
    if found["correctness"]["differing"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
