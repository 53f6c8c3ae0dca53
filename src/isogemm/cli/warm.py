"""``isogemm warm``: compile ahead what first calls on this CPU would, or choose a model's kernels on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, cast

import numpy as np
import typer

from ..base.arguments import unknown
from ..base.progress import progress_bar
from .options import numbers, refuse_beside, refuse_given

Step = tuple[str, Callable[[], object]]
# Rows at which other code computes: one, a few, many.
ROWS = (1, 8, 64)
NARROW = 72  # columns, of which few are left behind the last whole tile
NARROW_ROWS = (64, 256)  # where tiles walk A in place, and packed
QUANTIZED_ROWS = (15, 64)  # 8, 4, 2 and 1 at a time; and more than one compiled call takes
QUANTIZED = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


def warm_command(
    here: typer.Context,
    parts: Annotated[list[str] | None, typer.Argument(help="products, half, quantized, torch. Default: all.")] = None,
    model: Annotated[str, typer.Option(help="On a GPU: the linears of a named model, for example Qwen3-4B.")] = "",
    m: Annotated[str, typer.Option("--m", help="With --model: rows, for example 1,16,512.")] = "1,16,64,256",
    device: Annotated[str, typer.Option(help="With --model: which GPU.")] = "cuda",
) -> None:
    """Compile ahead what first calls would compile, so that none of them waits; what is there is not made again.

    Without --model: the kernels for this CPU, into the cache directory that `isogemm info` names. In an image, run it
    while the image is built, on a CPU of the kind that will run it.
    """
    from ..base.jit import compile_seconds

    if model:
        refuse_beside(here, f"--model {model}", "parts")
        _on_gpu(model, m, device)
        return
    refuse_given(here, ("m", "device"), limit="with --model", value="alone", nearest="--model NAME")
    wanted = list(parts or PARTS)
    for part in wanted:
        if part not in PARTS:
            raise unknown("part", part, PARTS, "none named, for all")
    started = time.perf_counter()
    steps = [step for part in wanted for step in PARTS[part]()]
    with progress_bar() as tell:
        for done, (name, run) in enumerate(steps):
            tell(done, len(steps), name)
            run()
        tell(len(steps), len(steps), "done")
    spent = time.perf_counter() - started
    typer.echo(f"{', '.join(wanted)}: ready after {spent:.0f} s, {compile_seconds():.0f} s of it compiling")


def _on_gpu(model: str, m: str, device: str) -> None:
    from ..api.warm import warm
    from ..lab.models import model as named

    sizes = numbers("--m", m, nearest="1,16,512")
    typer.echo(warm([(linear.n, linear.k) for linear in named(model).linears()], m=sizes, device=device))


def _products() -> Iterator[Step]:
    from ..backends import open_device
    from ..operands.device_array import HOST

    yield from _floats(np.dtype(np.float32))
    yield "which kernels are the fastest here", cast(Any, open_device(HOST)).learn_facts


def _half() -> Iterator[Step]:
    import ml_dtypes

    for dtype in (ml_dtypes.bfloat16, np.float16):
        yield from _floats(np.dtype(dtype))


def _floats(dtype: np.dtype[Any]) -> Iterator[Step]:
    from ..api.packing import pack
    from ..api.products import linear, matmul

    x, w, bias = (np.ones(shape, dtype) for shape in ((max(ROWS), 64), (64, 64), (64,)))
    for rows in ROWS:
        yield f"{dtype}, {rows} rows", partial(linear, x[:rows], w, bias)
        yield f"{dtype}, {rows} rows, packed", partial(linear, x[:rows], pack(w))
    for rows in NARROW_ROWS:
        narrow = np.ones((rows, 64), dtype), np.ones((NARROW, 64), dtype)
        yield f"{dtype}, {rows} rows, {NARROW} columns", partial(linear, *narrow)
        yield f"{dtype}, {rows} rows, {NARROW} columns, packed", partial(linear, narrow[0], pack(narrow[1]))
    yield f"{dtype}, batches", partial(matmul, np.ones((3, 64, 64), dtype), w)


def _quantized() -> Iterator[Step]:
    from ..api.products import linear
    from ..quant.encode import quantize

    def run(name: str, rows: int) -> object:
        return linear(np.ones((rows, 256), np.float32), quantize(np.ones((32, 256), np.float32), name))

    for name in QUANTIZED:
        for rows in QUANTIZED_ROWS:
            yield f"{name}, {rows} rows", partial(run, name, rows)


def _torch() -> Iterator[Step]:
    """A small layer of each kind and a small model, forward and backward; nothing where torch is not installed."""
    if find_spec("torch") is None:
        return
    import torch

    from .. import torch as ours

    def block(dtype: Any) -> None:
        layer = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.RMSNorm(64))
        ours.convert(layer.to(dtype))
        x = torch.ones(8, 64, dtype=dtype, requires_grad=True)
        layer(x).sum().backward()

    def attention(dtype: Any) -> None:
        q, k, v = (torch.ones(1, 2, 8, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        ours.attention(q, k, v, causal=True).sum().backward()

    def softmax() -> None:
        x = torch.ones(8, 64, requires_grad=True)
        ours.reductions.log_softmax(x).sum().backward()

    def model(dtype: Any) -> None:
        import transformers

        config = transformers.Qwen3Config(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=64,
        )  # fmt: skip
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        ours.convert(whole)
        ids = torch.ones(2, 8, dtype=torch.int64)
        whole(ids, labels=ids).loss.backward()
        with torch.no_grad():
            whole(ids[:, :1], None, None, transformers.DynamicCache(config=config))  # its name is another from 5.24 on

    whole_models = find_spec("transformers") is not None
    for dtype in (torch.float32, torch.bfloat16):
        yield f"layers in {dtype}", partial(block, dtype)
        yield f"attention in {dtype}", partial(attention, dtype)
        if whole_models:
            yield f"a model in {dtype}", partial(model, dtype)
    yield "softmax", softmax


PARTS: dict[str, Callable[[], Iterator[Step]]] = {
    "products": _products,
    "half": _half,
    "quantized": _quantized,
    "torch": _torch,
}
