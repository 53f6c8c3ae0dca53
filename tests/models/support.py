"""docs/support.md, from what the tests hold: `python -m tests.models.support` runs all families and writes it again."""

from __future__ import annotations

import logging
import sys
import textwrap
import warnings
from pathlib import Path

import torch
import transformers
from tests.models.families import HELD, HELD_BUT_LEFT, REFUSED, judged, loaded

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = [(mode, name) for mode in ("convert", "invariant") for name in DTYPES]
HEAD = """
Made by `python -m tests.models.support`, from tiny models of each family with random weights, on a CPU, eager, without
gradients, with transformers {version}; `tests/models/test_families.py` holds it. A cell is what `isogemm.torch.verify`
saw after `isogemm.torch.convert(model, strict=True)`, and of the plain model inside `isogemm.torch.invariant()`: *held*
(a prompt alone, again, in a batch, at another index, padded on the left and on the right, in chunks and token by token
has the same bits in every logit), *refused* by name, or the relations in which bits *changed*. *Under load* is a
request of transformers' continuous batching in float32, alone and among others, against the prompt at once; *not
batched* is what transformers cannot run so itself. CUDA, compiled and captured code, training, LoRA, FSDP and quantized
weights are not tried for each family. Sliding windows have six keys, and their caches drop the others. transformers'
compressors of DeepSeek-V4 take padding on the left for tokens: a prompt has another result with it than alone, not
another rounding of it. So a converted model refuses such a mask: give it prompts of one length, or each alone. Padding
on the right holds.
"""


def cell(name: str, mode: str, dtype: str) -> str:
    """What one family does in one mode."""
    try:
        found = judged(name, mode, DTYPES[dtype])
    except Exception as error:  # a family that transformers itself cannot run in this dtype
        return f"not run: {type(error).__name__}"
    return found.replace("|", "/")


def page() -> str:
    """The whole page, as it is now."""
    rows, reasons = [], []
    for name in sorted((*HELD, *HELD_BUT_LEFT, *REFUSED), key=str.lower):
        cells = [cell(name, *column) for column in COLUMNS]
        cells.append("refused" if name in REFUSED else loaded(name, torch.float32).partition(":")[0])
        rows.append(f"| {name} | " + " | ".join(x.partition(":")[0] if x[:7] == "refused" else x for x in cells) + " |")
        if cells[0].startswith("refused"):
            reasons.append(wrapped(f"- **{name}**: {cells[0].removeprefix('refused: ')}", "  "))
    titles = ["family", *(" ".join(column) for column in COLUMNS), "under load"]
    table = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows]
    told = [
        "",
        "What is refused, and why. With `leave=` of those names the rest is converted, and their bits may change.",
        "",
    ]
    head = ["# Which models hold", "", wrapped(HEAD.format(version=transformers.__version__)), ""]
    return "\n".join([*head, *table, *told, *reasons]) + "\n"


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph or an item of a list as the pages have them."""
    words = " ".join(text.split())
    return textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)  # of requests that cannot be batched
    torch.set_num_threads(1)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
