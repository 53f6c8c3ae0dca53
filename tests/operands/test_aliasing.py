"""Outputs that share memory with what is read: refused wherever that cannot be ruled out, and nowhere else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import isogemm
from isogemm.errors import AliasError, DTypeError
from isogemm.operands import aliasing

A, B = (np.random.default_rng(i).standard_normal((8, 8), np.float32) for i in range(2))


def test_c_of_another_item_is_no_place_for_an_output():
    one, other = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    with pytest.raises(AliasError):
        isogemm.gemm_grouped([A, A], [B, B], c=[one, other], beta=1.0, out=[other, one])
    isogemm.gemm_grouped([A, A], [B, B], c=[one, other], beta=1.0, out=[one, other])


def test_what_cannot_be_decided_counts_as_shared(monkeypatch):
    def hard(*_, **__):
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", hard)
    buffer = np.zeros(64, np.float32)
    assert aliasing.share_memory(buffer[::2], buffer[1::2])


def test_a_wide_output_is_apart_from_what_begins_within_its_lines():
    buffer = np.zeros((8, 32), np.float32)
    outs = [buffer[:, :8], buffer[:, 8:16]]
    aliasing.check_items_apart(outs, [("a", 0, buffer[:, 16:])])
    with pytest.raises(AliasError):
        aliasing.check_items_apart(outs, [("a", 0, buffer[2:4, :8])])


def test_dimensions_in_another_order_do_not_overlap(monkeypatch):
    monkeypatch.setattr(aliasing, "_MAX_ENUMERATED", 4)
    assert not aliasing.overlaps_itself(np.empty((2, 3, 4)).transpose(1, 0, 2))


def test_a_walk_starts_from_float32():
    c = np.ones((8, 8), ml_dtypes.bfloat16)
    with pytest.raises(DTypeError, match="dtype of c"):
        isogemm.gemm(A, B, c=c, accumulate=True, out_dtype=ml_dtypes.bfloat16)
