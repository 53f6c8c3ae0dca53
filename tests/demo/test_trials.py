"""The demo's comparisons count what a provider with a known fault changes."""

from __future__ import annotations

import numpy as np
import pytest

from isogemm.demo import forward, show, trials


def _faulty(m: int) -> forward.Multiplier:
    """Right, except that the last bit of every first output is flipped when a linear is given exactly `m` rows."""

    def linear(x, parameters):
        out = forward.NUMPY.linear(x.astype(np.float64), parameters).astype(np.float32)
        if len(x) == m:
            out.view(np.uint32)[:, 0] ^= 1
        return out

    def matmul(a, b):
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)

    return forward.Multiplier("faulty", linear, matmul)


# 22 rows: pieces of 4, 5 and 10 leave 2 rows over, which must not be given to the provider as another M.
@pytest.mark.parametrize("m", [1, 2, 4, 5, 10])
def test_row_drift_counts_the_fault_and_nothing_else(small, small_batch, m):
    provider = _faulty(2)
    rows = 22
    inputs = [(linear, x[:rows]) for linear, x in trials.activations(small, small_batch, provider)]
    found = trials.row_drift(provider, inputs, m)
    assert found.outputs == sum(rows * len(linear.weight) for linear, _ in inputs)
    if m == 2:
        assert (found.outputs_changed, found.linears_changed) == (rows * len(inputs), len(inputs))
        assert (found.median_ulps, found.largest_ulps) == (1.0, 1)
    else:
        assert (found.outputs_changed, found.linears_changed, found.largest_ulps) == (0, 0, 0)


def test_drift_counts_sentences_and_numbers():
    expected = np.eye(4, 6, dtype=np.float32) + np.float32(0.5)
    got = expected.copy()
    got[1, 2] = np.nextafter(got[1, 2], np.float32(2))
    got[3, :2] = -got[3, :2]
    found = trials.drift(forward.NUMPY, "t", expected, got)
    assert (found.sentences, found.sentences_changed, found.outputs, found.outputs_changed) == (4, 2, 24, 3)
    assert found.largest_difference == 1.0
    assert found.largest_ulps == 2 * int(np.float32(0.5).view(np.uint32))
    unmoved = trials.drift(forward.NUMPY, "t", expected, expected.copy())
    assert (unmoved.outputs_changed, unmoved.largest_cosine_distance) == (0, 0.0)


def test_one_token_at_a_time_shows_a_fault_at_m_1(small, small_batch):
    provider = _faulty(1)
    expected = trials.alone(small, small_batch, provider)
    changed = {
        trial.name: trials.drift(provider, trial.name, expected, trial.embed(small, small_batch, provider))
        for trial in trials.trials(len(small_batch))
    }
    name = "alone, linears token by token"
    assert changed.pop(name).sentences_changed == len(small_batch)
    assert not any(row.sentences_changed for row in changed.values())


def test_conclusions_say_what_was_measured():
    def drift(name, changed):
        return trials.EmbeddingDrift(name, "t", 4, changed, 24, changed, changed, 1e-7 * changed, 0.0)

    def rows(name, changed):
        return trials.RowDrift(name, 1, 6, changed, 60, changed, 1.0, 1)

    text = show.conclusions([drift("a", 2), drift("b", 0), drift("c", 0)], [rows("a", 3), rows("b", 3), rows("c", 0)])
    assert "changed bits in 1 of 1 schedules, a number by 2.0e-07" in text[0]
    assert "M = 1" in text[0]
    assert text[1].startswith("b: no embedding changed a bit, but its linears alone changed at M = 1")
    assert text[2].startswith("c: no bit changed")
