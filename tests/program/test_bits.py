"""Every plan of one graph has the same bits, and those are isogemm.torch's."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.program_bits import adamw, drawn_choices
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.program.small import BATCH, MODEL, TOKENS, converted, differing, program, tokens, trained, weights

from isogemm.program import AdamW, tuned, tuning
from isogemm.program.executor import scalars
from isogemm.torch import reductions


@pytest.fixture(scope="module")
def wanted():
    return trained(program(threads=1))


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 3}, {"threads": 12, "mode": "fast"}, {"mode": "fast"}, {"recompute": True}, {"micro_batches": 2},
        {"micro_batches": 4, "recompute": True, "mode": "fast"}, {"micro_batches": 8, "threads": 3},
    ],
    ids=str,
)  # fmt: skip
def test_every_choice_has_the_same_bits(options, wanted):
    made = program(**options)
    made.check()
    assert differing(trained(made), wanted) == []


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_drawn_plans_have_the_same_bits(seed, wanted):
    """Tiles, threads and groups of leaves that no planner would choose, too."""
    choices = drawn_choices(program(), random.Random(seed), 5)
    made = program(threads=5, choices=choices)
    made.check()
    assert differing(trained(made), wanted) == []


def test_a_tuned_plan_has_the_same_bits(wanted, monkeypatch):
    """Operations that took less by one thread go to it, and others stay: of times that are made up."""
    made, honest = program(threads=3, batch=BATCH), tuning._once
    threaded = [op["name"] for op in made.plan["ops"] if op["dispatch"]["threads"] > 1]
    slow = set(threaded[::2])

    def once(run):
        honest(run)
        threads = {op["name"]: op["dispatch"]["threads"] for op in run.program.plan["ops"]}
        run.executor.times = [(name, "", 0.0, 2.0 - ((n == 1) == (name in slow))) for name, n in threads.items()]

    monkeypatch.setattr(tuning, "_once", once)
    found = tuned(made, rounds=1)
    found.check()
    assert {op["name"] for op in found.plan["ops"] if op["dispatch"]["threads"] > 1} == set(threaded) - slow
    assert slow
    assert differing(trained(found), wanted) == []


def test_a_gradient_depends_on_its_leaf(wanted):
    """So the test above compares something: other leaves are other numbers."""
    assert "dw.head" in differing(trained(program(leaf=16)), wanted)


@pytest.mark.parametrize(("tied", "norms", "architecture"), [(False, True, "Qwen3"), (True, False, "Llama")])
def test_a_training_step_is_that_of_isogemm_torch(tied, norms, architecture):
    """The loss's terms, every gradient and every weight after ten steps; a tied head and heads without norms, too."""
    model = replace(MODEL, tie_word_embeddings=tied, head_norms=norms)
    given, known = weights(model), {name: key for name, key, _ in model.weights()}
    peer, parameters, config = converted(model, architecture)
    made = program(config)
    run = made.start(given | {"inv_freq": peer.model.rotary_emb.inv_freq.numpy()})
    state = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in given.items()}
    for step in range(10):
        ids, targets = (torch.from_numpy(x) for x in tokens(step, model))
        peer.zero_grad()
        log_p = reductions.log_softmax(peer(ids, use_cache=False).logits)
        (-log_p.gather(-1, targets[..., None]).sum() / (BATCH * TOKENS)).backward()
        run.step(ids.numpy(), targets.numpy(), AdamW(lr=1e-2))
        for name, key in known.items():
            p = parameters[key]
            total = made.graph.values.get(f"dw.{name}.by.x")
            g = run.array(f"dw.{name}") + (run.array(total.name) if total else np.float32(0))
            assert np.array_equal(p.grad.numpy().view(np.int32), g.view(np.int32)), (step, name)
            w, *state[name] = adamw(p.detach().numpy(), g, *state[name], scalars(AdamW(lr=1e-2), step + 1))
            p.data.copy_(torch.from_numpy(w))
            assert np.array_equal(w.view(np.int32), run.array(name).view(np.int32)), (step, name)


def test_a_prefill_has_the_logits_of_isogemm_torch_and_of_a_part():
    peer, _, config = converted(MODEL)
    made, part = program(config, phase="prefill"), program(config, phase="prefill", batch=1, threads=3)
    ids, given = tokens()[0], weights() | {"inv_freq": peer.model.rotary_emb.inv_freq.numpy()}
    found = made.start(given).logits(ids)
    with torch.no_grad():
        wanted = peer(torch.from_numpy(ids), use_cache=False).logits.numpy()
    assert np.array_equal(found.reshape(wanted.shape).view(np.int32), wanted.view(np.int32))
    for i in (0, 5):
        alone = part.start(given).logits(ids[i : i + 1])
        assert np.array_equal(alone[0].view(np.int32), found[i].view(np.int32))


def test_a_step_is_near_float64():
    """Every gradient against plain torch in float64."""
    transformers = pytest.importorskip("transformers")
    sizes = {name: x for name, x in MODEL.to_dict().items() if name not in ("head_norms", "rope_theta")}
    peer = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes), dtype=torch.float64)
    given = weights()
    names = {key: name for name, key, _ in MODEL.weights()}
    peer.load_state_dict({key: torch.from_numpy(given[name].astype(np.float64)) for key, name in names.items()})
    ids, targets = (torch.from_numpy(x) for x in tokens())
    logits = peer(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    run = program().start(given)
    run.step(ids.numpy(), targets.numpy())
    for key, p in peer.named_parameters():
        exact, found = p.grad.numpy(), run.array(f"dw.{names[key]}")
        bound = 16 * np.finfo(np.float32).eps * np.sqrt(BATCH * TOKENS) * np.abs(exact).max()
        assert np.abs(found - exact).max() <= bound, key
