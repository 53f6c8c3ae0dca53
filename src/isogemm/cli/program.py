"""``isogemm program``: lower a model, check, explain and run what came of it, and compare two programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.disk import read_object, write_whole, writing
from ..base.progress import progress_bar
from ..errors import OptionError
from .options import check_out

app = typer.Typer(help="Steps of a model whose every buffer and thread is written down before they run.")
Folder = Annotated[Path, typer.Argument(help="A folder that `lower` wrote.")]


@app.command("lower")
def lower_command(
    config: Annotated[Path, typer.Argument(help="A config.json of a Qwen3, Llama or GPT-2 model, or its folder.")],
    out: Annotated[Path, typer.Option(help="The folder for plan and layout.")],
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each, or that caches hold.")] = 64,
    phase: Annotated[str, typer.Option(help="train, prefill or decode.")] = "train",
    threads: Annotated[int, typer.Option(help="That a step may use.", show_default="all")] = 0,
    mode: Annotated[str, typer.Option(help="deterministic or fast: the same bits.")] = "deterministic",
    micro_batches: Annotated[int, typer.Option(help="Parts that a step is computed in.")] = 1,
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute activations again.")] = False,
    leaf: Annotated[int, typer.Option(help="Rows of a leaf in gradients of weights.")] = 4096,
    tune: Annotated[bool, typer.Option("--tune", help="Time each operation by one thread and by several.")] = False,
    quantize: Annotated[
        str, typer.Option(help="A format of the weights of prefill and decode, as Q4_0, or a .gguf file.")
    ] = "",
) -> None:
    """Write a model's execution plan and memory layout."""
    from ..program import lower, tuned
    from ..program.program import check_folder
    from ..quant import load

    check_folder(out, phase)
    formats: Any = load(quantize) if quantize.endswith(".gguf") else quantize or None
    made = lower(
        _read(config), batch=batch, tokens=tokens, phase=phase, threads=threads or None, mode=mode,
        micro_batches=micro_batches, recompute=recompute, leaf=leaf, quantize=formats,
    )  # fmt: skip
    made = tuned(made) if tune else made
    made.check()
    folder = made.save(out)
    typer.echo(f"{len(made.plan['ops'])} operations, {made.layout['bytes']} bytes: {folder}")


def _read(config: Path) -> dict[str, Any]:
    """A model's sizes, from the file or from its folder."""
    file = config / "config.json" if config.is_dir() else config
    nearest = "a model's config.json, or by: hf download Qwen/Qwen3-0.6B config.json --local-dir Qwen3-0.6B"
    return read_object("config", file, nearest)


@app.command("check")
def check_command(folder: Folder) -> None:
    """Check a plan and a layout without running them; the first thing that is wrong is named by its field."""
    from ..program import load

    made = load(folder)
    typer.echo(f"{len(made.plan['ops'])} operations and {len(made.layout['tensors'])} tensors: nothing is wrong")


@app.command("explain")
def explain_command(
    folder: Folder,
    html: Annotated[Path | None, typer.Option(help="A page with pictures of memory and threads, for offline.")] = None,
) -> None:
    """Tables of phases and memory, and operations that leave threads without work."""
    from ..program import load
    from ..program.picture import page

    made = load(folder)
    if html is not None:
        check_out(html, "pictures.html")
        with writing(html, "pictures.html"):
            write_whole(html, page(made))
    typer.echo(made.explain())
    if html is not None:
        typer.echo(f"Pictures: {html}")


@app.command("run")
def run_command(
    folder: Folder,
    weights: Annotated[
        Path | None, typer.Option(help="A .safetensors or .gguf file; by default random numbers.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of training, prefills, or tokens that are decoded.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of tokens and random weights.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="A Chrome trace of the last step, for Perfetto.")] = None,
) -> None:
    """Run steps on random tokens, and say the bits of each: its loss, or the sum of its logits.

    Each step of training, or of a prefill, has the same batch; decoding goes on with the likeliest token. With --trace
    the bits are said when it is written.
    """
    import numpy as np

    from ..program import load
    from ..program.explain import trace as write_trace

    if trace is not None:
        check_out(trace, "trace.json")
    made, draw = load(folder), np.random.default_rng(seed)
    run, about = made.start(_weights(made.model, weights, draw)), made.plan["isogemm"]
    if made.phase == "decode" and steps > about["tokens"]:
        raise OptionError("steps", limit=f"at most {about['tokens']}", value=steps, nearest=about["tokens"])
    tokens = draw.integers(0, made.model.vocab_size, (about["batch"], about["tokens"] + 1))
    ids, words = tokens[:, 0], {"train": "loss", "prefill": "sum of logits", "decode": "sum of logits"}
    lines: list[str] = []
    with progress_bar() as tell:
        for step in range(steps):
            tell(step, steps, made.phase)
            run.executor.times = [] if trace is not None and step == steps - 1 else None
            if made.phase == "train":
                found = np.float32(run.step(tokens[:, :-1], tokens[:, 1:]))
            elif made.phase == "prefill":
                found = run.logits(tokens[:, :-1]).sum()
            else:
                logits = run.decode(ids, np.full(len(ids), step))
                ids, found = logits.argmax(-1), logits.sum()
            line = f"step {step + 1:>4}  {words[made.phase]} {found:.6f}  {found.view(np.uint32):08x}"
            (typer.echo if trace is None else lines.append)(line)
    if trace is not None and run.executor.times is not None:
        with writing(trace, "trace.json"):
            lines.append(f"Trace: {write_trace(run.executor.times, trace)}")
        typer.echo("\n".join(lines))


def _weights(model: Any, path: Path | None, draw: Any) -> Any:
    if path is None:
        from ..program.tuning import random_weights

        return random_weights(model, draw)
    from ..quant import load

    return load(path)


@app.command("diff")
def diff_command(one: Folder, other: Folder) -> None:
    """What two programs differ in, and whether their bits can."""
    from ..program import load
    from ..program.explain import differences

    plans, numbers = differences(load(one), load(other))
    for line in plans:
        typer.echo(line)
    for line in numbers:
        typer.echo(f"numbers: {line}")
    typer.echo("The bits may differ." if numbers else "The bits cannot differ: both are plans of one graph.")
