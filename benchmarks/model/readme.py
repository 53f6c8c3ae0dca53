"""The figures of whole models, from committed results; `benchmarks.readme` puts them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..common import Row, seconds_text, sources_text, wrapped
from .cases import GRAD, LINEARS, MAIN_GRAD, PART, ROUTED, TORCH, WHOLE

__all__ = ["changed", "model_section"]


MODES = {"eager": "eager", "graph": "CUDA graph", "compile": "torch.compile", "compile-graph": "compiled, CUDA graph"}
VARIANTS = (LINEARS, ROUTED, WHOLE)
GRADIENTS = (GRAD, MAIN_GRAD)
LAYERS = {"mlp": "MLP 2560, 9728", "attention": "projections around attention"}


def model_section(runs: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """The page's text between the marks."""
    # A case that a later file measured again counts there alone.
    rows = list({row["name"]: row for run in runs for row in run["rows"] if row["timings"]}.values())
    device = runs[-1]["device"]["before"]
    return "\n".join(
        [*_models(rows, device), *_training(rows), *_operations(rows), *_bits(rows), *sources_text(sources), ""]
    )


def _models(rows: Sequence[Row], device: Mapping[str, Any]) -> list[str]:
    """What is said of whole models, and their table."""
    packages = device.get("packages", {})
    return [
        *wrapped(
            f"A language model of Qwen3-0.6B's shape (transformers, bfloat16, random weights) on one {device['name']}, "
            f"torch {packages.get('torch', 'unknown')}: tokens per second of plain torch, and the speed relative to it "
            "where its linears are isogemm's (by `convert(model, parts=('linear',))`, or routed by "
            "`enable(rows=False, attention=False)`), and where everything from tokens to logits is (`convert(model)`). "
            "Decoding has 1024 tokens of context. Where everything is converted, a norm, a gate and a rotation are one "
            "kernel each; in transformers' modules they are several of torch's, unless a compiler fuses them: "
            "speed over plain torch that is not compiled is for a large part that fusion, and torch with a "
            "compiler, by its default mode, is in the rows of torch.compile."
        ),
        "",
        "| | | plain torch | " + " | ".join(VARIANTS) + " |",
        "|---" * (3 + len(VARIANTS)) + "|",
        *(
            f"| {_what(row)} | {_plain(row)} | " + " | ".join(_ratio(row, v) for v in VARIANTS) + " |"
            for row in rows
            if row["suite"] not in ("train", "parts")
        ),
        "",
    ]


def _training(rows: Sequence[Row]) -> list[str]:
    """What is said of layers in training, and their table."""
    out = [
        *wrapped(
            "Forward and backward of Qwen3-4B's linear layers over 8192 tokens, weight gradients to bfloat16 `.grad`, "
            "or continued from a float32 `main_grad`:"
        ),
        "",
        "| | | plain torch, `.grad` | " + " | ".join(f"`{v}`" for v in GRADIENTS) + " |",
        "|---" * (3 + len(GRADIENTS)) + "|",
    ]
    for row in rows:
        if row["suite"] == "train":
            time = seconds_text(row["timings"][TORCH]["median"])
            what = f"{LAYERS[row['phase']]} | {MODES[row['mode']]} | {time}"
            out.append(f"| {what} | " + " | ".join(_ratio(row, v) for v in GRADIENTS) + " |")
    return [*out, ""]


def _operations(rows: Sequence[Row]) -> list[str]:
    """What is said of single operations, and their table."""
    out = [
        *wrapped(
            "Single operations, device time, and the speed of isogemm relative to torch's functions (two for silu_mul; "
            "attention by the kernel that torch chooses itself):"
        ),
        "",
        "| | torch | isogemm | speed |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row["suite"] == "parts":
            times = [seconds_text(row["timings"][name]["median"] / row["calls"]) for name in (TORCH, PART)]
            out.append(f"| {_part(row)} | {' | '.join(times)} | {_ratio(row, PART)} |")
    return [*out, ""]


def _part(row: Row) -> str:
    if row["phase"] != "attention":
        return f"{row['phase']}, {row['tokens']} rows of {row['context']}"
    queries = "one query each" if row["tokens"] == 1 else f"{row['tokens']} causal queries"
    return f"attention, batch {row['batch']}, {queries}, {row['context']} keys"


def _what(row: Row) -> str:
    phase = f"decode, batch {row['batch']}" if row["phase"] == "decode" else f"prefill of {row['tokens']}"
    return phase + (f", {row['layers']} layers" if row["layers"] else "")


def _plain(row: Row) -> str:
    return f"{MODES[row['mode']]} | {row['tokens_per_second'][TORCH]:,.0f}/s"


def _ratio(row: Row, variant: str) -> str:
    return next((f"{v['ratio']:.2f}" for v in row["verdicts"] if v["ours"] == variant), "–")


def changed(rows: Sequence[Row], suite: str, variant: str) -> str:
    """Over the rows of a suite: elements that changed, of those compared."""
    found = [row["correctness"].get(variant) for row in rows if row["suite"] == suite and row["correctness"]]
    counts = [bits for bits in found if bits]
    return f"{sum(b['differing'] for b in counts):,} of {sum(b['checked'] for b in counts):,}"


def _bits(rows: Sequence[Row]) -> list[str]:
    """How many elements change with the rows beside them, or with the micro-batches, by variant."""
    logits, gradients = (partial(changed, rows, suite) for suite in ("model", "train"))
    return wrapped(
        f"Logits that change when other rows are beside theirs: {logits(TORCH)} in plain torch, {logits(LINEARS)} with "
        f"isogemm's linears, {logits(WHOLE)} with everything. Weight gradients that change when the batch is "
        f"cut in two: {gradients(TORCH)} in plain torch, {gradients(MAIN_GRAD)} with `main_grad`. From"
    )
