"""Families of decoders, tiny: each holds every relation after `convert(strict=True)`, or is refused by name.

`python -m tests.models.support` writes docs/support.md of the same families.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models.families import HELD, HELD_BUT_LEFT, NOT_BATCHED, REFUSED, family, judged, loaded  # noqa: E402
from tests.models.support import PAGE  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
QUIET = pytest.mark.filterwarnings("ignore:.*RoPE scaling", "ignore:.*torch.jit.script")


@QUIET
@DTYPES
@DEVICES
@pytest.mark.parametrize("name", HELD)
def test_a_family_holds(name, dtype, device):
    assert judged(name, "convert", dtype, device) == "held"


@QUIET
@DEVICES
@pytest.mark.parametrize("name", HELD)
def test_a_family_holds_inside_invariant(name, device):
    assert judged(name, "invariant", torch.float32, device) == "held"


@QUIET
@DTYPES
@pytest.mark.parametrize("name", HELD_BUT_LEFT)
def test_a_family_whose_padding_is_tokens_holds_but_for_it(name, dtype):
    assert judged(name, "convert", dtype) == "held, left-padding refused"
    assert judged(name, "invariant", dtype) == "changed: left-padding"
    if dtype is torch.float32:  # another result, not another rounding of one
        model, ids = family(name, torch.float32), torch.arange(21)[None] + 3
        rows, mask = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
        with torch.no_grad():
            alone = model(ids, use_cache=False).logits
            padded = model(rows, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
        assert float((padded.logits[:, 3:] - alone).abs().max()) > 1e-3 * float(alone.abs().max())


@QUIET
@pytest.mark.parametrize("name", ["Gemma3", "Mixtral"])  # windows and experts; the page has all of them
def test_a_family_holds_under_load(name):
    assert loaded(name, torch.bfloat16) == "held"


@QUIET
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_by_name(name):
    model = family(name, torch.float32)
    kinds = [type(child) for child in model.modules()]
    with pytest.raises(OptionError, match=REFUSED[name]):
        iso.convert(model, strict=True)
    assert [type(child) for child in model.modules()] == kinds


def test_the_page_names_every_family():
    text = PAGE.read_text()
    for name in HELD:
        load = "not batched" if name in NOT_BATCHED else "held"
        assert f"| {name} | held | held | held | held | {load} |" in text
    for name in HELD_BUT_LEFT:
        cells = ["held, left-padding refused"] * 2 + ["changed: left-padding"] * 2
        assert f"| {name} | {' | '.join(cells)} | not batched |" in text
    for name in REFUSED:
        assert f"| {name} | refused | refused | " in text
        assert f"- **{name}**: " in text
