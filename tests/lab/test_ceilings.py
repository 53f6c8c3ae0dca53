"""Ceilings: the arithmetic with made-up clocks, and that the loops do the work they claim."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.errors import OptionError
from isogemm.lab import Ceilings, StreamingRead, Work, ceilings, fp32_peak, streaming_read
from isogemm.lab.ceilings import PEAK_ROUNDS
from isogemm.lab.probes import ACCUMULATORS, add_kernel, multiply_add_kernel


class Metronome:
    """Every call takes as long as told, by turns; the calls are made."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.turn = seconds, 0

    def elapsed(self, run, first, calls):
        for i in range(calls):
            run(first + i)
        self.turn += 1
        return calls * self.seconds[self.turn % len(self.seconds)]

    def pause(self, seconds):
        pass


def test_work_of_a_product():
    assert Work.gemm(2, 3, 5, itemsize=4) == Work(60, 4 * (10 + 15 + 6))
    assert Work.gemm(2, 3, 5, itemsize=2, out_itemsize=4, batch=7) == Work(420, 7 * (2 * 25 + 24))


def test_the_roofline_is_the_slower_of_two_bounds():
    found = Ceilings(2, bytes_per_second=100.0, flops_per_second=1000.0)
    assert found.bound(Work(flops=1000, nbytes=10)) == 1.0
    assert found.bound(Work(flops=10, nbytes=1000)) == 10.0
    assert found.fraction(Work(flops=10, nbytes=1000), 20.0) == 0.5
    assert found.to_dict() == {"threads": 2, "read_gb_per_second": 1e-7, "fp32_gflop_per_second": 1e-6}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_streaming_read_reads_every_word(threads):
    read = StreamingRead(threads, nbytes=8 * 1001)
    assert read.run(0) == 1001
    for t, share in enumerate(read._shares):
        share[-1] += t + 1
    assert read.run(1) == 1001 + threads * (threads + 1) // 2
    assert (read.nbytes, read.candidate.name) == (8008, "read")


def test_bandwidth_is_the_best_block_over_the_bytes(monkeypatch):
    monkeypatch.setattr(ceilings, "READ_BYTES", 3 << 20)
    for cache in (1000, 1 << 20):  # four of them, if that is more
        monkeypatch.setattr(ceilings, "last_level_cache", lambda cache=cache: cache)
        bandwidth = streaming_read(1, blocks=4, clock=Metronome(0.5, 0.25))
        assert bandwidth == max(3 << 20, 4 * cache) / 0.25


def test_peak_counts_two_operations_a_lane():
    width = multiply_add_kernel()[1]
    peak = fp32_peak(2, blocks=2, clock=Metronome(1.0))
    assert peak == 2 * 2 * width * ACCUMULATORS * PEAK_ROUNDS


def test_the_peak_kernel_makes_its_rounds():
    kernel, width = multiply_add_kernel()
    assert width in (4, 8, 16)
    for rounds in (0, 1, 5):
        values = np.arange(ACCUMULATORS, dtype=np.float32)
        for _ in range(rounds):
            values = values / 2 + np.float32(0.25)
        assert kernel(rounds) == pytest.approx(float(values.sum()), rel=1e-6)


def test_the_read_kernel_sums():
    assert add_kernel()(np.arange(1000)[::3]) == sum(range(0, 1000, 3))


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 3, "nbytes": 16}])
def test_bad_options(options):
    with pytest.raises(OptionError):
        StreamingRead(**options)
