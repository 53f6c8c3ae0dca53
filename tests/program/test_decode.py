"""Decoding has the bits of a prefill and of isogemm.torch, whatever else lies in its caches; likewise in blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.program.small import MODEL, converted, program, tokens, weights

import isogemm
from isogemm.errors import OptionError, ShapeError
from isogemm.program import load
from isogemm.program.program import from_data

LENGTH, BATCH = 20, 3
WIDE = replace(MODEL, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")


def bits(x):
    return np.asarray(x).view(np.int32)


def lowered(phase, model=MODEL, **options):
    return program(model, phase=phase, **({"batch": BATCH, "tokens": LENGTH} | options))


def given_of(model, peer):
    return weights(model) | {"inv_freq": peer.model.rotary_emb.inv_freq.numpy()}


def logits_of(peer, ids):
    with torch.no_grad():
        return peer(torch.from_numpy(ids), use_cache=False).logits.numpy()


def decoded(run, ids, first=0):
    """Logits of every token from `first`, one after the other."""
    some = [run.decode(ids[:, t], np.full(len(ids), t)) for t in range(first, ids.shape[1])]
    return np.stack(some, axis=1)


def test_decoding_has_the_logits_of_a_prefill_and_of_isogemm_torch():
    """From empty caches; from those of a prefill; in longer ones that hold something else behind; on other threads."""
    peer, _, _ = converted(MODEL)
    ids, given = tokens(batch=BATCH, length=LENGTH)[0], given_of(MODEL, peer)
    wanted = logits_of(peer, ids)
    prefill = lowered("prefill").start(given)
    assert np.array_equal(bits(prefill.logits(ids)), bits(wanted))
    run = lowered("decode").start(given)
    assert np.array_equal(bits(decoded(run, ids)), bits(wanted))
    part = lowered("prefill", tokens=7, threads=1).start(given)
    part.logits(ids[:, :7])
    longer = lowered("decode", tokens=150, threads=3).start(given)
    for name in ("L0.k.cache", "L1.v.cache"):
        longer.array(name)[...] = 1e3
    longer.fill(part)
    assert np.array_equal(bits(decoded(longer, ids, 7)), bits(wanted[:, 7:]))


def test_a_sequence_does_not_see_what_another_one_left_behind_it():
    """Infinities and NaN of a sequence whose place it has, which stay for a step that sees them again."""
    ids, given = tokens(batch=BATCH, length=LENGTH)[0], weights()
    alone, run = (lowered("decode", tokens=150).start(given) for _ in range(2))
    wanted = decoded(alone, ids)
    for left in (np.nan, -np.inf):
        decoded(run, ids)
        run.array("L0.v.cache")[1, :, 3] = left
        run.array("L1.v.cache")[2, 0, 140, 5] = left
        for t in (1, 2):
            logits = run.decode(ids[:, t], [t] * BATCH)
            assert np.array_equal(bits(logits), bits(wanted[:, t])), f"{left} behind position {t}"
        seen = run.decode(ids[:, 4], [4] * BATCH)
        assert np.isnan(seen[1]).all()
        assert np.array_equal(bits(seen[[0, 2]]), bits(wanted[[0, 2], 4]))
    assert np.array_equal(bits(decoded(run, ids)), bits(wanted))


def test_a_sequence_does_not_know_of_others_nor_of_leaves_behind():
    """Each at its own position, across a leaf of keys; alone, with others, and in another program's caches."""
    model, length = replace(MODEL, num_hidden_layers=1), 140
    ids = tokens(batch=2, length=length, model=model)[0]
    whole = lowered("prefill", model, batch=2, tokens=length).start(weights(model)).logits(ids)
    run, alone = (lowered("decode", model, batch=n, tokens=length).start(weights(model)) for n in (2, 1))
    for t in range(length):
        at = np.array([t, max(0, t - 3)])
        found = run.decode(ids[[0, 1], at], at)
        for i in (0, 1):
            assert np.array_equal(bits(found[i]), bits(whole[i, at[i]])), (t, i)
    for t in range(length):
        assert np.array_equal(bits(alone.decode(ids[1:, t], [t])[0]), bits(whole[1, t])), t


def test_decoding_is_saved_checked_and_refused(tmp_path):
    made = lowered("decode", quantize={"*.wo": None, "L*": "Q8_0"}, model=WIDE)
    again = load(made.save(tmp_path))
    assert (again.plan, again.layout) == (made.plan, made.layout)
    run = again.start(weights(WIDE))
    with pytest.raises(ShapeError, match=r"positions: limit: whole numbers from 0 to 19; got: 20; .* 19"):
        run.decode([0] * BATCH, [0, 1, LENGTH])
    with pytest.raises(ShapeError, match=r"ids: limit: whole numbers .* got: float64"):
        run.decode([0.0] * BATCH, [0, 1, 2])
    with pytest.raises(OptionError, match=r"keys of a prefill: limit: those of a call of logits; got: none"):
        run.fill(lowered("prefill", WIDE).start(weights(WIDE)))  # which has computed nothing yet
    with pytest.raises(OptionError, match=r"phase of logits: limit: prefill"):
        run.logits(np.zeros((BATCH, LENGTH), int))
    with pytest.raises(ShapeError, match=r"tokens of a prefill: limit: at most 20"):
        run.fill(lowered("prefill", WIDE, tokens=21).start(weights(WIDE)))
    with pytest.raises(OptionError, match=r"micro_batches of phase decode: limit: 1"):
        lowered("decode", micro_batches=3)


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantized_programs_have_the_bits_of_isogemm_torch(fmt):
    """Prefill and decode, by two plans; the operation names format and contract."""
    peer, _, _ = converted(WIDE, quantize=fmt)
    ids, given = tokens(batch=BATCH, length=LENGTH, model=WIDE)[0], given_of(WIDE, peer)
    wanted = logits_of(peer, ids)
    made = lowered("prefill", WIDE, quantize=fmt)
    found = made.start(given).logits(ids)
    assert np.array_equal(bits(found), bits(wanted))
    op = next(op for op in made.plan["ops"] if op["name"] == "L0.q")
    assert op["kernel_id"] == f"gemm_nt_{fmt.lower()}_{'q8_k' if 'K' in fmt else 'q8_0'}"
    assert op["isogemm"]["contract"] == "int32/chain"
    run = lowered("decode", WIDE, quantize=fmt, threads=3).start(given)
    assert np.array_equal(bits(decoded(run, ids[:, :3])), bits(wanted[:, :3]))


def test_a_quantized_weight_lies_as_in_a_file():
    """The layout has exactly its bytes, those of `isogemm.quantize`, which may be given as well."""
    made, given = lowered("decode", WIDE, quantize="Q4_0"), weights(WIDE)
    entry = next(x for x in made.layout["tensors"] if x["name"] == "L1.down")
    assert (entry["dtype"], entry["shape"], entry["bytes"]) == ("Q4_0", [256, 512], 256 * 288)
    stored = isogemm.quantize(given["L1.down"], "Q4_0")
    one, other = made.start(given), made.start(given | {"L1.down": stored})
    assert np.array_equal(one.array("L1.down"), stored.rows)
    ids = np.arange(BATCH)
    assert np.array_equal(bits(one.decode(ids, ids)), bits(other.decode(ids, ids)))
    with pytest.raises(OptionError, match=r"format of model.layers.1.mlp.down_proj.weight: limit: Q4_0"):
        made.start(given | {"L1.down": isogemm.quantize(given["L1.down"], "Q8_0")})


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(
        ShapeError, match=r"q_proj.weight: columns of a Q4_K matrix: .*multiple of its block, 256.*Q5_0"
    ):
        lowered("prefill", replace(WIDE, hidden_size=896), quantize="Q4_K")
    with pytest.raises(ShapeError, match=r"columns of a Q4_0 matrix"):
        lowered("prefill", quantize="Q4_0")
    with pytest.raises(OptionError, match=r"quantize: limit: patterns of weights' names; got: L7"):
        lowered("prefill", quantize={"L7.*": "Q4_0"})
    with pytest.raises(OptionError, match=r"quantize: limit: None with phase='train'"):
        lowered("train", WIDE, quantize="Q4_0")


def test_a_tile_that_cuts_a_panel_is_refused():
    made = lowered("prefill", WIDE, quantize="Q4_0")
    number = next(i for i, op in enumerate(made.plan["ops"]) if op["name"] == "L0.g")
    made.plan["ops"][number]["dispatch"] |= {"tile_n": 24, "split_axis": "n", "threads": 2, "schedule": "claimed"}
    with pytest.raises(OptionError, match=rf"ops\[{number}\].dispatch.tile_n: limit: a multiple of 16"):
        from_data(made.plan, made.layout)
