"""Providers that fail, lie or are missing are reported with the reason; nothing stops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isogemm import audit
from isogemm.errors import DTypeError, OptionError, ShapeError
from isogemm.lab.models import LinearShape

from . import fakes

SHAPE = LinearShape("fake", fakes.N, fakes.K)


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        (fakes.raises, "raised RuntimeError: no kernel for this shape"),
        (fakes.raises_without_words, "raised Wordless: <exception str() failed>"),
        (fakes.leaves, "raised SystemExit: 3"),
        (fakes.lists, "returned list, not a NumPy array"),
        (fakes.transposed, "returned shape [24, 5] where [5, 24] was due"),
        (fakes.wide, "returned dtype float64, not float32"),
        (fakes.zeros, "is not x @ w.T (relative error 1.0)"),
        (fakes.not_finite, "garbage: outputs of finite operands are not finite"),
        (fakes.writes_x, "changed its input x"),
        (fakes.writes_w, "changed its input w"),
        (fakes.swaps_w, "changed its input w"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fault_is_reported_and_the_next_provider_is_not_harmed(provider: object, reason: str) -> None:
    report = audit.run([provider, fakes.honest], [SHAPE], require=[], sweep=[1, 2, 5], speed=False)
    bad, good = report.providers.values()
    assert bad.reason == f"fake: {reason}"
    assert bad.status == "failed"
    assert not report.held(bad.name)
    assert report.held(good.name)


def test_a_result_that_is_wrong_in_some_columns_alone_is_no_product() -> None:
    def half(x, w):
        y = fakes.honest(x, w)
        y[:, fakes.N // 2 :] = 0
        return y

    report = audit.run([half], [SHAPE], require=[], sweep=[1], relations=["rerun"], speed=False)
    (result,) = report.providers.values()
    assert "is not x @ w.T (relative error 0." in result.reason


def test_a_provider_to_which_nothing_applies_has_not_run() -> None:
    packs = audit.CallableProvider("packs", fakes.honest)
    packs.packed = fakes.honest
    report = audit.run([packs, "numpy"], [SHAPE], relations=["packing"], speed=False)
    assert report.held("packs")
    assert (report.missing, report.exit_status) == (["numpy"], 3)


def test_a_fault_at_one_size_fails_only_the_cases_that_meet_it() -> None:
    report = audit.run([fakes.raises_at_64], [SHAPE], require=[], sweep=[1, 2, 64], speed=False)
    (result,) = report.providers.values()
    assert result.status == "failed"
    population = result.relations["population"]
    assert (population.held, population.failed) == (1, 2)
    assert population.reason == "raised ValueError: 64 is too many"
    assert result.relations["padding"].status == "held"


def test_a_dtype_that_flips_between_calls_is_a_fault() -> None:
    def flips(x, w):
        y = fakes.honest(x, w)
        return y.astype("float32") if len(x) == 1 else y

    report = audit.run([flips], [SHAPE], require=[], dtype="float16", sweep=[1, 2], speed=False)
    (result,) = report.providers.values()
    assert result.relations["population"].reason == "returned dtype float32 where it returned float16 before"


def test_torch_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    report = audit.run([fakes.honest, "torch"], [SHAPE], require=["torch"], sweep=[1, 2], speed=False)
    assert report.providers["torch"].status == "absent"
    assert "torch is not installed here" in report.providers["torch"].reason
    assert not report.ok
    assert report.held("tests.audit.fakes:honest")


def test_a_module_that_fails_on_import_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    name = f"{tmp_path}/broken.py:f"
    report = audit.run([name, fakes.honest], [SHAPE], require=[], sweep=[1, 2], speed=False)
    assert report.providers[name].status == "absent"
    assert "a_package_that_is_not_there" in report.providers[name].reason


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mymodule.my_linear", r"nor module:function.*nearest legal choice: mymodule:my_linear, with a colon"),
        ("mymodule:my_linear", r"no module mymodule here.*where mymodule\.py lies, or path/to/mymodule\.py:my_linear"),
        ("no.package:f", r"where no/package\.py lies, or path/to/no/package\.py:f"),
        ("tests.audit.fakes:honets", r"has no callable honets.*nearest legal choice: tests\.audit\.fakes:honest$"),
        ("tests.audit.fakes:quux", r"nearest legal choice: module:function of a module that can be imported"),
        ("nonsense", r"nearest legal choice: module:function of a module that can be imported"),
    ],
)
def test_a_name_that_cannot_be_imported_is_told_what_to_write(name: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        audit.run([name], [SHAPE], require=[], sweep=[1, 2], speed=False)


def test_one_shape_without_its_list_is_told_so() -> None:
    with pytest.raises(ShapeError, match=r"limit: a list of \(n, k\); .*nearest legal choice: \[\(96, 64\)\]"):
        audit.run([fakes.honest], (96, 64), sweep=[1], speed=False)


def test_a_function_for_weights_that_lie_the_other_way_is_told_how_they_lie() -> None:
    report = audit.run(
        [audit.CallableProvider("mine", lambda x, w: x @ w)], [SHAPE], require=[], sweep=[1], speed=False
    )
    said = report.providers["mine"].relations["population"].reason or report.providers["mine"].reason
    assert "it is given x [rows, k] and w [n, k], as a linear layer has them, and returns x @ w.T" in said


def test_a_dtype_that_a_provider_does_not_take_is_reported() -> None:
    provider = audit.CallableProvider("only fp32", fakes.honest)
    provider.dtypes = ("float32",)
    report = audit.run([provider], [SHAPE], require=[], dtype="bfloat16", sweep=[1, 2], speed=False)
    assert report.providers["only fp32"].reason == "does not take bfloat16"
    assert report.providers["only fp32"].status == "absent"


def test_required_providers_are_audited_too() -> None:
    report = audit.run([fakes.by_m], [SHAPE], require=["isogemm"], sweep=[1, 2], speed=False)
    assert set(report.providers) == {"tests.audit.fakes:by_m", "isogemm"}
    assert report.ok


def test_what_a_user_brings_is_required_unless_something_else_is() -> None:
    report = audit.run([fakes.by_m, "numpy"], [SHAPE], sweep=[1, 2], relations=["population"], speed=False)
    assert (report.required, report.exit_status) == (("tests.audit.fakes:by_m",), 1)


def test_batches_beyond_the_memory_limit_are_left_out_and_noted() -> None:
    limit = 10 * (3 * fakes.K * 4 + 2 * fakes.N * 4)  # ten rows
    report = audit.run([fakes.honest], [SHAPE], require=[], sweep=[1, 2, 10, 11, 64], memory=limit, speed=False)
    assert report.notes == ["fake: batch sizes 11, 64 left out: beyond the memory limit"]
    (result,) = report.providers.values()
    assert result.relations["population"].not_applicable == 4  # each of the two alone, and against the size before
    assert result.status == "held"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"providers": ["nonsense"]}, OptionError),
        ({"providers": ["no_such_module:f"]}, OptionError),
        ({"providers": ["json:no_such_function"]}, OptionError),
        ({"providers": ["/no/such/file.py:f"]}, OptionError),
        ({"providers": []}, OptionError),
        ({"shapes": []}, ShapeError),
        ({"shapes": [(0, 4)]}, ShapeError),
        ({"dtype": "float64"}, DTypeError),
        ({"relations": ["telepathy"]}, OptionError),
        ({"sweep": []}, OptionError),
        ({"sweep": [0]}, OptionError),
        ({"seed": -1}, OptionError),
        ({"memory": "4"}, ShapeError),
        ({"memory": -4}, ShapeError),
        ({"inputs": "/no/such/file.npy"}, OptionError),
    ],
    ids=str,
)
def test_bad_options_are_typed_errors(options: dict[str, object], error: type[Exception]) -> None:
    defaults: dict[str, object] = {"providers": ["numpy"], "shapes": [SHAPE], "require": [], "speed": False}
    with pytest.raises(error):
        audit.run(**(defaults | options))
