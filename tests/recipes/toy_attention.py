"""A kernel of attention, as CONTRIBUTING tells to add one: this file, and its row. It computes the definition."""

from __future__ import annotations

from typing import Any

from tests.backends.cuda.attention.test_admit import Host

from isogemm.backends.cuda.attention.case import AttentionCase
from isogemm.backends.cuda.attention.family import Attention, Run

HOST = Host()


class Toy(Attention):
    """Whatever tensor cores can compute."""

    name = "attention toy"

    def rank(self, case: AttentionCase) -> int | None:
        return -1

    def defines(self, case: AttentionCase) -> dict[str, Any]:
        return {"CAUSAL": case.offset is not None}

    def launch(self, case: AttentionCase) -> Run:
        run: Run = HOST.bind(case, "toy")
        return run
