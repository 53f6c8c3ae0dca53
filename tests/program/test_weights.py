"""Weights from files: GGUF's names and order of rows give the bits of the same weights in a safetensors file."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.program.small import BATCH, MODEL, program, tokens, weights
from tests.program.test_command import called, losses
from tests.program.test_gpt2 import CONFIG as GPT2

import isogemm
from isogemm.errors import DTypeError, OptionError, ShapeError
from isogemm.program.model import decoder, is_turned
from isogemm.quant import load

QWEN3 = replace(MODEL, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
LLAMA = replace(QWEN3, head_norms=False, tie_word_embeddings=True)
MODELS = {"qwen3": QWEN3, "llama": LLAMA, "gpt2": decoder(GPT2)}
PLAIN = {"F32": np.float32, "F16": np.float16}
FORMATS = {"token_embd": "Q6_K", "attn_v": "Q8_0", "ffn_down": "Q6_K", "ffn_gate": "F16", "output": "Q4_K"}


def floats(path, model):
    """A checkpoint as transformers has it."""
    given = weights(model)
    names = {name: key for name, key, _ in model.weights()}
    save_file({names[x]: np.ascontiguousarray(w.T if is_turned(names[x]) else w) for x, w in given.items()}, path)


def interleaved(w, heads):
    """Rows as llama.cpp's converter has them: of each head a row of the first half, then one of the second."""
    return w.reshape(heads, 2, len(w) // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def written(path, arch, quantize=False, changed=lambda tensors: tensors, **said):
    """The same weights in a GGUF file; quantized as FORMATS says, else Q4_0. Returns them as a program takes them."""
    model = MODELS[arch]
    kind = next(x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table, heads = gguf.get_tensor_name_map(kind, 2), {"wq": model.num_attention_heads, "wk": model.num_key_value_heads}
    tensors, ours = {}, {}
    for name, key, shape in model.weights():
        label, w = table.get_name(key, try_suffixes=(".weight", ".bias")), weights(model)[name]
        fmt = FORMATS.get(label.split(".")[-2], "Q4_0") if quantize and len(shape) == 2 else "F32"
        ours[name] = w.astype(PLAIN[fmt]) if fmt in PLAIN else isogemm.quantize(w, fmt)
        part = name.partition(".")[2]
        if arch == "llama" and part in heads:
            w = interleaved(w, heads[part])
        stored = w.astype(PLAIN[fmt]) if fmt in PLAIN else isogemm.quantize(w, fmt).rows
        tensors[label] = stored, gguf.GGMLQuantizationType[fmt]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(model.num_attention_heads)
    for name, value in said.items():
        getattr(writer, f"add_{name}")(value)
    for label, (w, fmt) in changed(tensors).items():
        writer.add_tensor(label, w, raw_dtype=fmt)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ours


@pytest.mark.parametrize("arch", MODELS)
def test_the_command_says_the_same_bits_from_either_file(arch, tmp_path):
    config, model = tmp_path / "config.json", MODELS[arch]
    config.write_text(json.dumps(GPT2.to_dict() if arch == "gpt2" else model.to_dict() | {"model_type": arch}))
    floats(tmp_path / "w.safetensors", model)
    written(tmp_path / "w.gguf", arch)
    for phase in ("train", "prefill"):
        called("lower", config, "--batch", 2, "--tokens", 8, "--phase", phase, "--out", tmp_path / phase)
        one, other = (
            losses(called("run", tmp_path / phase, "--steps", 2, "--weights", tmp_path / f"w.{kind}"))
            for kind in ("safetensors", "gguf")
        )
        assert len(one) == 2
        assert one == other


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_blocks_of_a_file_are_those_that_are_computed_with(arch, tmp_path):
    """Formats of every weight are the file's; an embedding in blocks is dequantized, and so is a head tied to it."""
    model, path = MODELS[arch], tmp_path / "w.gguf"
    ours = written(path, arch, quantize=True)
    ours["embed"] = ours["embed"].dequantize()
    ids = tokens(model=model)[0]
    made = program(model, phase="prefill", quantize=load(path))
    dtypes = {op["isogemm"].get("of"): op["isogemm"]["contract"] for op in made.plan["ops"]}
    assert [dtypes[f"L0.{x}"] for x in ("q", "g", "d")] == ["int32/chain", "fma/chain", "int32/chain"]
    found, wanted = (made.start(given).logits(ids).view(np.int32) for given in (load(path), ours))
    assert np.array_equal(found, wanted)
    one, other = (program(model, phase="decode", quantize=load(path)).start(given) for given in (load(path), ours))
    for t in range(2):
        found, wanted = (run.decode(ids[:, t], [t] * BATCH).view(np.int32) for run in (one, other))
        assert np.array_equal(found, wanted)


def without(name):
    return lambda tensors: {label: x for label, x in tensors.items() if label != name}


def cut(name):
    return lambda tensors: tensors | {name: (tensors[name][0][:-2].copy(), tensors[name][1])}


def test_a_file_of_another_model_is_refused_by_name(tmp_path):
    made, path = program(LLAMA, phase="prefill"), tmp_path / "w.gguf"
    extra = {"rope_freqs.weight": (np.ones(16, np.float32), gguf.GGMLQuantizationType.F32)}
    for options, error, words in (
        ({"changed": without("blk.1.ffn_up.weight")}, OptionError, "weights: .*got: no blk.1.ffn_up.weight"),
        (
            {"changed": cut("blk.0.attn_q.weight")},
            ShapeError,
            r"blk.0.attn_q.weight: limit: \[256, .*got: \[254, 256\]",
        ),
        ({"changed": lambda x: x | extra}, OptionError, "tensors of the file: .*got: rope_freqs.weight"),
        (
            {"rope_dimension_count": 16},
            OptionError,
            "llama.rope.dimension_count of the file: limit: 32, head_dim; got: 16",
        ),
        ({"rope_freq_base": 5e5}, OptionError, "llama.rope.freq_base of the file: limit: 10000.0.*got: 500000"),
        ({"rope_scaling_type": gguf.RopeScalingType.YARN}, OptionError, "rope.scaling.type of the file: .*got: yarn"),
    ):
        written(path, "llama", **options)
        with pytest.raises(error, match=words):
            made.start(load(path))
    written(path, "qwen3")
    with pytest.raises(OptionError, match="architecture of the file: limit: llama"):
        made.start(load(path))


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    """What its other tensors would add is in no number; what transformers makes itself may be there."""
    made, path = program(LLAMA, phase="prefill"), tmp_path / "w.safetensors"
    floats(path, LLAMA)
    given = {name: np.array(x) for name, x in load(path).items()}
    ids = tokens(model=LLAMA)[0]
    wanted = made.start(load(path)).logits(ids).view(np.int32)
    embed, layer = given["model.embed_tokens.weight"], "model.layers.0.self_attn"
    same = {"lm_head.weight": embed, f"{layer}.rotary_emb.inv_freq": np.ones(16, np.float32)}
    save_file(given | same, path)
    assert np.array_equal(made.start(load(path)).logits(ids).view(np.int32), wanted)
    for other, x in (
        (f"{layer}.q_proj.bias", np.ones(256, np.float32)),
        (f"{layer}.q_norm.weight", np.ones(32, np.float32)),
        ("model.layers.2.mlp.up_proj.weight", given["model.layers.1.mlp.up_proj.weight"]),
        ("lm_head.weight", embed + 1),
    ):
        save_file(given | {other: x}, path)
        with pytest.raises(OptionError, match=f"tensors of the file: .*got: {other}"):
            made.start(load(path))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: limit: default; got: linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_type: limit: default; got: llama3"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor: .*0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: limit: 1.0; got: 0.5"),
    ],
)
def test_rotations_that_programs_do_not_have_are_refused(said, words):
    with pytest.raises(OptionError, match=words):
        decoder(LLAMA.to_dict() | {"model_type": "llama"} | said)


def test_blocks_along_the_other_dimension_are_refused():
    model = MODELS["gpt2"]
    given = weights(model) | {"L0.wo": None}
    given["transformer.h.0.attn.c_proj.weight"] = isogemm.quantize(weights(model)["L0.wo"].T, "Q4_0")
    made = program(model, phase="prefill", quantize="Q4_0")
    with pytest.raises(OptionError, match=r"attn.c_proj.weight in blocks: limit: \[n, k\]"):
        made.start(given)


def test_blocks_do_not_train(tmp_path):
    path = tmp_path / "w.gguf"
    blocks = isogemm.quantize(weights(LLAMA)["embed"], "Q8_0").rows, gguf.GGMLQuantizationType.Q8_0
    written(path, "llama", changed=lambda x: x | {"token_embd.weight": blocks})
    with pytest.raises(OptionError, match=r"format of token_embd.weight: limit: float32; got: Q8_0"):
        program(LLAMA).start(load(path))
    written(path, "llama", quantize=True)
    made = program(LLAMA, phase="prefill")
    with pytest.raises(OptionError, match=r"format of blk.0.attn_q.weight: limit: float32; got: Q4_0"):
        made.start(load(path))
    floats(tmp_path / "w.safetensors", LLAMA)
    file = load(tmp_path / "w.safetensors")
    with pytest.raises(OptionError, match=r"quantize: limit: a format, or a GGUF file"):
        program(LLAMA, phase="prefill", quantize=file)


def test_weights_of_16_bits_are_what_they_were_and_others_are_not_cast():
    torch = pytest.importorskip("torch")
    made = program(LLAMA, phase="prefill")
    given = {name: torch.from_numpy(x).bfloat16() for name, x in weights(LLAMA).items()}
    wide = {name: x.float() for name, x in given.items()}
    found, wanted = (made.start(x).logits(tokens(model=LLAMA)[0]) for x in (given, wide))
    assert found.tobytes() == wanted.tobytes()
    for other in (wide["L0.wq"].double(), wide["L0.wq"].int(), wide["L0.wq"].numpy().astype(complex)):
        with pytest.raises(DTypeError, match=r"wq|q_proj"):
            made.start(wide | {"L0.wq": other})


def test_a_rotation_has_a_positive_base():
    with pytest.raises(OptionError, match=r"rope_theta: limit: a positive number; got: 0"):
        decoder(LLAMA.to_dict() | {"model_type": "llama", "rope_theta": 0})
