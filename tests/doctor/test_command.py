"""``isogemm doctor``: a case in a file, a function, the recipe, and its exit statuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from isogemm.cli.commands import app
from isogemm.errors import OptionError

RNG = np.random.default_rng(2)
A, B = RNG.standard_normal((37, 53)).astype(np.float32), RNG.standard_normal((53, 41)).astype(np.float32)


def run(*words: object):
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def test_a_case(tmp_path):
    np.savez(tmp_path / "right.npz", observed=A @ B, a=A, b=B)
    np.savez(tmp_path / "wrong.npz", observed=(A @ B.reshape(41, 53).T), a=A, b=B, alpha=1.0)
    right, wrong = run(tmp_path / "right.npz"), run(tmp_path / "wrong.npz", "--steps")
    assert (right.exit_code, wrong.exit_code) == (0, 1)
    assert right.stdout.strip().startswith("right: all 1517 elements")  # what is compiled is said beside it
    assert "likely cause:" in wrong.output
    steps = [line for line in wrong.output.splitlines() if line[:1].isdecimal()]
    assert [line[0] for line in steps] == list("12345678")


def test_steps_say_what_was_in_c_and_whether_the_first_of_a_batch_is_right_alone(tmp_path):
    c = RNG.standard_normal((37, 41)).astype(np.float32)
    np.savez(tmp_path / "added.npz", observed=A @ B + c, a=A, b=B, c=c)
    said = run(tmp_path / "added.npz", "--steps").output
    assert "with beta 0: 1517 of 1517 elements are wrong" in said
    assert "with beta 1: 0 of 1517 elements are wrong" in said
    both = np.stack([A @ B, A @ B + 9])
    np.savez(tmp_path / "batch.npz", observed=both, a=np.stack([A, A]), b=np.stack([B, B]), pairs=False)
    assert "item 0 alone: 0 of 1517 elements are wrong" in run(tmp_path / "batch.npz", "--steps").output


def test_a_case_with_a_contract(tmp_path):
    np.savez(tmp_path / "case.npz", observed=A[:, ::-1] @ B[::-1], a=A, b=B, contract="fma/chain", pairs=False)
    found = run(tmp_path / "case.npz", "--steps")
    assert found.exit_code == 0
    assert "other-order: right within rounding, but not the bits of fma/chain" in found.output


def test_a_function_of_blocks_and_of_one_size(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom isogemm.formats import blocks, reference\n\n"
        "def f(x, rows):\n    w = reference.dequantize(rows, blocks.format_of('Q8_0'))\n"
        "    assert w.shape == (24, 96)\n    return (x.astype('f4') @ w.T[:, ::-1]).astype(x.dtype)\n"
    )
    words = ("--signature", "x, blocks", "--format", "Q8_0", "--n", 24, "--k", 96)
    found = run("--call", f"{tmp_path}/mine.py:f", *words)
    assert found.exit_code == 1
    assert "n, k = (37, 24, 96)" in found.output


def test_a_function(tmp_path):
    (tmp_path / "mine.py").write_text("def f(a, b):\n    return a[:, :-1] @ b[:-1]\n\ndef g(a, b):\n    return a @ b\n")
    wrong, right = run("--call", f"{tmp_path}/mine.py:f"), run("--call", f"{tmp_path}/mine.py:g")
    assert (wrong.exit_code, right.exit_code) == (1, 0)
    assert "K ends at" in wrong.output


def test_what_a_function_says_is_printed_whatever_it_is(tmp_path):
    (tmp_path / "mine.py").write_text("def f(a, b):\n    raise ValueError('odd \\ud800')\n")
    command = [sys.executable, "-m", "isogemm", "doctor", "--call", f"{tmp_path}/mine.py:f"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "refused: ValueError: odd \\ud800" in done.stdout


def test_bad_usage(tmp_path):
    for words in ((), ("x.npz",), ("x.npz", "--selftest"), ("--steps", "--selftest")):
        assert "Error" in type(run(*words).exception).__name__
    assert "got: none" in str(run().exception)
    assert "got: x.npz and --selftest" in str(run("x.npz", "--selftest").exception)
    assert "nearest legal choice: --call mine.py:f" in str(run("mine.py:f").exception)
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(OptionError, match=r"--call: limit: a module that can be imported; got: .*SyntaxError"):
        raise run("--call", f"{tmp_path / 'bad.py'}:f").exception
    said = str(run("--call", "numpy").exception)  # which is a provider of an audit, and no function
    assert said.startswith("unknown function (not module:function): limit: module:function or file.py:function")
    assert said.endswith("nearest legal choice: module:function of a module that can be imported")
    (tmp_path / "mine.py").write_text("def f(x, w):\n    return x @ w.T\n")
    call = ("--call", f"{tmp_path / 'mine.py'}:f")
    assert str(run(*call, "--signature", "x,w").exception).endswith("nearest legal choice: 'x, w'")
    said = "nearest legal choice: no format, or the signature 'x, blocks'"
    assert str(run(*call, "--format", "Q4_0").exception).endswith(said)
    np.savez(tmp_path / "half.npz", a=A)
    assert "observed" in str(run(tmp_path / "half.npz").exception)
