"""The tree of decisions in plans: one branch is taken, the one of the schedule, and crossovers are a table's."""

from __future__ import annotations

import pytest

import isogemm


def taken(plan: object) -> list[str]:
    return [value for name, value in plan.rows() if name == "-> if"]


@pytest.mark.parametrize(
    ("extents", "options", "branch"),
    [
        ((1, 4096, 512), {}, "gemv"),
        ((4, 4096, 512), {"trans_b": "N"}, "stream"),
        ((80, 40, 50), {}, "small"),
        ((150, 4096, 512), {}, "skinny"),
        ((300, 4096, 512), {}, "tiled"),
        ((1, 4096, 512), {"packed": True}, "on panels"),
        ((300, 4096, 512), {"packed": True}, "on panels"),
        ((4096, 1, 512), {}, "gemv"),
    ],
)
def test_a_cpu_s_plan_shows_the_branch_that_its_schedule_took(extents, options, branch):
    plan = isogemm.plan(*extents, **options)
    (line,) = taken(plan)
    assert line.endswith(branch)
    assert plan.packed or line.endswith(plan.strategy)
    assert "16 to 64 rows are usual" in str(plan)


def test_a_gpu_s_plan_shows_the_ranges_of_its_table():
    kernels = {}
    for m in (1, 16, 128, 4000):
        plan = isogemm.plan(m, 2560, 4096, dtype="bfloat16", device="cuda")
        (line,) = taken(plan)
        assert line.endswith(f"{plan.family} [{plan.config.partition(' #')[0]}]")
        ends = [most for most, _ in plan.tree]
        assert ends == sorted(set(ends))
        assert all(one != other for (_, one), (_, other) in zip(plan.tree, plan.tree[1:], strict=False))
        kernels[m] = line
    assert len(set(kernels.values())) > 2


@pytest.mark.parametrize("m", [90, 5000])
def test_rows_that_were_not_timed_are_a_model_s_and_have_no_tree(m):
    plan = isogemm.plan(m, 2560, 4096, dtype="bfloat16", device="cuda")
    assert plan.reason.startswith("a model of its time")
    assert not plan.tree
