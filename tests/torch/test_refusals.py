"""What `isogemm.torch` says to operands that are no tensors, and where torch is missing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import isogemm
from isogemm.errors import DTypeError, OptionError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_operands_that_are_no_tensors(grad, buffer):
    x, w = torch.ones(3, 512), torch.ones(8, 512, requires_grad=grad)
    host = np.ones((8, 512), np.float32)
    options = {"main_grad": torch.zeros(8, 512)} if buffer else {}
    cases = [
        ("x", (x.numpy(), w, None)),
        ("w", (x, host, None)),
        ("w", (x, isogemm.pack(host), None)),
        ("bias", (x, w, np.ones(8, np.float32))),
        ("x", (None, w, None)),
    ]
    for name, operands in cases:
        with pytest.raises(DTypeError, match=rf"^{name} of linear: .*isogemm\.linear, for inference"):
            isogemm.torch.linear(*operands, **options)


def test_a_list_of_tensors_is_told_the_functions_for_those():
    items, w = [torch.ones(4), torch.ones(4)], torch.ones(3, 4)
    for call in (isogemm.linear, isogemm.torch.linear):
        with pytest.raises(
            DTypeError, match=r"^x.*got: list of tensors; nearest legal choice: torch\.stack\(x\).*grouped"
        ):
            call(items, w)


def test_complex_numbers_are_told_of_their_parts():
    x = torch.ones(3, 4, dtype=torch.complex64)
    for call in (isogemm.matmul, isogemm.torch.mm):
        with pytest.raises(DTypeError, match="real and imaginary parts") as caught:
            call(x, x.mT)
        assert "int8" not in str(caught.value)
        assert "float()" not in str(caught.value)  # it would drop the imaginary part


def test_integers_are_told_of_int8():
    with pytest.raises(DTypeError, match=r"by x\.float\(\), or torch\.int8 where every value fits, exactly, on a CPU"):
        isogemm.linear(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64))


def test_a_double_linear_has_a_name():
    for module, what in (
        (torch.nn.Linear(4, 4).double(), "^dtype of the Linear's weight"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4)).double(), "^dtype of 0.weight"),
    ):
        with pytest.raises(DTypeError, match=what + r".*by model\.float\(\) before convert"):
            isogemm.torch.convert(module)


def test_without_torch_the_import_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import isogemm; import isogemm.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert 'pip install "isogemm[torch]"' in last


def test_without_torch_the_package_can_be_looked_at():
    code = """if True:
        import sys; sys.modules['torch'] = None
        import inspect, io, pydoc, isogemm
        assert not hasattr(isogemm, 'torch')
        assert 'matmul' in dict(inspect.getmembers(isogemm))
        pydoc.Helper(output=io.StringIO()).help(isogemm)
        try:
            from isogemm import torch
        except ModuleNotFoundError as error:
            assert 'isogemm[torch]' in str(error)
        isogemm.torch
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("AttributeError: isogemm.torch ")
    assert 'pip install "isogemm[torch]"' in last


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: iso.reductions.softmax(torch.zeros(4, 8, dtype=torch.int32)), DTypeError, "x is int32"),
        (lambda: iso.reductions.layer_norm(torch.ones(2, 8), eps="1"), DTypeError, "eps"),
        (lambda: iso.attention(*[torch.ones(1, 1, 2, 4)] * 3, causal=True, offset=1.5), DTypeError, "offset"),
        (lambda: iso.attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout=torch.zeros(3)), DTypeError, "dropout"),
        (lambda: isogemm.gemm(*[torch.ones(2, 2)] * 2, alpha=torch.ones((), device="meta")), OptionError, "alpha"),
        (lambda: isogemm.gemm(*[torch.ones(2, 2)] * 2, trans_b=np.array(["N", "T"])), OptionError, "trans_b"),
        (
            lambda: isogemm.matmul([torch.ones(2, requires_grad=True)], np.ones((2, 1)), cast="float32"),
            DTypeError,
            "numbers in rows",
        ),
        (lambda: iso.scaled_dot_product_attention(*[torch.ones(2, 4)] * 3, None, np.ones(2)), DTypeError, "dropout_p"),
        (lambda: iso.reductions.sum(torch.ones(2, 8), keepdim="no"), DTypeError, "keepdim"),
        (lambda: iso.reductions.mean(torch.ones(2, 8), keepdim=torch.ones(2)), DTypeError, "keepdim"),
        (lambda: iso.reductions.rope(*[torch.ones(2, 8)] * 3, interleaved="no"), DTypeError, "interleaved"),
        (lambda: iso.reductions.rope_pair(*[torch.ones(2, 8)] * 4, interleaved="no"), DTypeError, "interleaved"),
        (lambda: iso.reductions.norm_rope_pair(*[torch.ones(2, 8)] * 6, interleaved="no"), DTypeError, "interleaved"),
        (lambda: iso.sequence_seeds([1, 2]), DTypeError, r"seeds: .*int64"),
        (lambda: iso.sequence_seeds(torch.arange(2)).__exit__(), OptionError, "as many ends as beginnings"),
    ],
)
def test_what_is_no_operand_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_scopes_of_seeds_end_in_any_order():
    first, second = (iso.sequence_seeds(torch.tensor([i])) for i in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert iso.sequence_seeds._open == [second.seeds]
    second.__exit__()
    assert not iso.sequence_seeds._open


def test_a_layer_without_gradients_takes_meta_tensors_and_names_others():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    iso.convert(layer)
    with torch.no_grad():
        with pytest.raises(DTypeError, match="x of linear"):
            layer([1.0])
        assert layer.to("meta")(torch.empty(2, 8, device="meta")).shape == (2, 8)


def test_gradients_of_nothing():
    c = torch.randn(0, requires_grad=True)
    iso.baddbmm(c, torch.randn(2, 3, 4), torch.randn(2, 4, 0)).sum().backward()
    assert c.grad.shape == (0,)
    c = torch.randn(0, 1, requires_grad=True)
    iso.baddbmm(c, torch.randn(2, 0, 4), torch.randn(2, 4, 5)).sum().backward()
    assert c.grad.shape == (0, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", [lambda: torch.nn.LayerNorm(8), lambda: torch.nn.RMSNorm(8), torch.nn.SiLU])
def test_what_is_traced_is_what_runs_without_gradients_too(made):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), made())
    iso.convert(model)
    x = torch.randn(3, 8)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_a_model_that_is_converted_in_inference_mode_is_whole_and_trains():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen3Config(vocab_size=64, num_hidden_layers=1, head_dim=16, **sizes)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.inference_mode():
        iso.convert(model, strict=True, fuse=True)
    ids = torch.arange(16).reshape(2, 8)
    model.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
