"""What a program is given from outside and cannot use is refused by its name, before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.program.small import BATCH, MODEL, program, tokens, weights

from isogemm.errors import DeviceError, DTypeError, OptionError, ShapeError
from isogemm.program import AdamW, Choices, decoder, lower, tuned

SIZES = {"vocab_size": 9, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ({"rope_scaling": "linear"}, OptionError, "rope_parameters or rope_scaling: .* got: linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, OptionError, "one rotation, for all layers"),
        ({"rope_theta": "x"}, OptionError, "rope_theta: .* nearest legal choice: 10000.0"),
        ({"rope_theta": 10**400}, OptionError, "rope_theta: .* nearest legal choice: 10000.0"),
        ({"rope_theta": True}, OptionError, "rope_theta: .* nearest legal choice: 10000.0"),
        ({"rms_norm_eps": 10**400}, OptionError, "rms_norm_eps: .* nearest legal choice: 1e-06"),
        ({"model_type": "gpt2", **SIZES, "n_positions": 2**40}, ShapeError, "positions: limit: at most"),
        ({"model_type": ["qwen3"]}, OptionError, "model_type"),
        ({"model_type": "gpt2", **SIZES, "n_embd": "4"}, ShapeError, "n_embd: .* nearest legal choice: 4"),
        ({"model_type": "gpt2", **SIZES, "n_head": 0}, ShapeError, "n_head: limit: a whole number of at least 1"),
        ({"model_type": "gpt2", **SIZES, "attn_pdrop": "no"}, DTypeError, "attn_pdrop: limit: a number"),
    ],
)
def test_configurations(data, error, said):
    with pytest.raises(error, match=said):
        decoder(MODEL.to_dict() | data)
    assert decoder({"model_type": "gpt2", **SIZES, "attn_pdrop": None}).dropout == 0


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"recompute": "no"}, DTypeError, "recompute: limit: True or False; got: 'no'"),
        ({"phase": "prefill", "quantize": {3: "Q8_0"}}, DTypeError, "quantize: limit: patterns of weights' names"),
        ({"choices": Choices("a")}, ShapeError, "threads of choices"),
        ({"choices": Choices(mode="quick")}, OptionError, "mode of choices"),
    ],
)
def test_options(options, error, said):
    with pytest.raises(error, match=said):
        lower(MODEL, batch=BATCH, tokens=8, **options)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)},
            OptionError,
            r"weights: .*q_proj\.bias",
        ),
        ({"inv_freq": np.ones(3)}, ShapeError, r"shape of inv_freq: limit: \[\d+\], half .* got: \[3\]"),
        ({"inv_freq": "abc"}, DTypeError, "dtype of inv_freq"),
    ],
)
def test_weights(more, error, said):
    """A bias that the model has and the program has not is in no number: it is not passed over."""
    with pytest.raises(error, match=said):
        program(MODEL, phase="prefill").start(weights(MODEL) | more)


def test_what_a_run_is_given():
    ids, targets = tokens()
    run = program().start(weights(MODEL))
    before = run.array("embed").copy()
    for given, error, said in (
        ([[1, 2], [3]], ShapeError, "ids: .* got: rows of different lengths"),
        (torch.ones(ids.shape, dtype=torch.int64, device="meta"), DeviceError, "meta"),
    ):
        with pytest.raises(error, match=said):
            run.step(given, targets)
    with pytest.raises(DTypeError, match="rates: limit: an AdamW; got: float"):
        run.step(ids, targets, 0.1)
    for rates in ({"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"betas": 0.9}, {"eps": -1e-8}):
        with pytest.raises(OptionError, match=next(iter(rates))):
            AdamW(**rates)
    with pytest.raises(DTypeError, match="lr: limit: a number"):
        AdamW("x")
    with pytest.raises(OptionError, match=r"tensor: .* got: 'L0.wqq'; nearest legal choice: L0.wq"):
        run.array("L0.wqq")
    with pytest.raises(DTypeError, match=r"prefill: .* got: Program"):
        program(MODEL, phase="decode").start(weights(MODEL)).fill(program(MODEL, phase="prefill"))
    with pytest.raises(DTypeError, match="program: limit: a Program"):
        tuned(run)
    assert (run.steps, run.array("embed").tobytes()) == (0, before.tobytes())
