"""``isogemm describe``: the call of a product, the names of a call, the meaning of a kernel."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from isogemm.cli import app
from isogemm.errors import IsogemmError

RUN = CliRunner()


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("128 512 256", ["gemm('N', 'N', 512, 128, 256, 1.0, b, 512, a, 256, 0.0, out, 512)", "cublasSgemm"]),
        ("128 512 256 --trans NT --lda 260", ["gemm('T', 'N', 512, 128, 256, 1.0, b, 256, a, 260,"]),
        ("64 64 64 --batch 8 --shared b --dtype fp16", ["0, 4096, 4096, 8)", "GemmStridedBatchedEx", "cores: yes"]),
        ("100000 100000 100000 --batch 500", ["gemm_strided_batched('N', 'N', 100000"]),
        ("64 64 64 --mode tf32", ["tensor cores: yes"]),
        ("64 64 63 --dtype int8", ["k = 63 is no multiple of 16", "int8: cublasGemmEx"]),
        ("gemm_nt_q5_0_q8_0", ["weights Q5_0", "activations Q8_0", "int32/chain"]),
        ("cblas_sgemm_batch", ["cublasSgemmBatched", "cublasSgemmGroupedBatched"]),
    ],
)  # fmt: skip
def test_describe(words: str, lines: list[str]) -> None:
    result = RUN.invoke(app, ["describe", *words.split()])
    assert result.exit_code == 0, result.output
    for line in lines:
        assert line in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("128 512", "M N K"),
        ("gemm_nt_q4_k gemm_nt_q6_k", "one name"),
        ("gemm_nt_q9", "gemm_nt_q4_k"),
        ("cublasDgemm", "cublasSgemm"),
        ("0 4 4", "at least 1"),
        ("4 4 4 --trans XN", "letters"),
        ("4 4 4 --lda 3", "at least 4"),
        ("4 4 4 --shared b", "--batch"),
        ("4 4 4 --dtype float64", "float32"),
        ("4 4 4 --mode fast", "one of default"),
    ],
)
def test_what_cannot_be_described_says_why(words: str, says: str) -> None:
    result = RUN.invoke(app, ["describe", *words.split()])
    assert isinstance(result.exception, IsogemmError)
    assert says in str(result.exception)
