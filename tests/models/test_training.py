"""Recipes of docs/recipes hold, each checks itself; and the Trainer's callback, event by event."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.process import python

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch.tensors import same  # noqa: E402

import isogemm.torch as iso  # noqa: E402
from isogemm.errors import OptionError  # noqa: E402

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
# What a recipe needs besides transformers, and whether it starts processes of its own.
NEEDS = {
    "checkpoint": ((), False),
    "compiled_step": ((), False),
    "fsdp2": ((), True),
    "lora": (("peft",), False),
    "trainer": (("accelerate",), False),
}


def test_every_recipe_is_run_and_short():
    assert {path.stem for path in RECIPES.glob("*.py")} == set(NEEDS)
    for path in RECIPES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("name", NEEDS)
def test_a_recipe_holds(name, monkeypatch, tmp_path):
    packages, forks = NEEDS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    path = str(RECIPES / f"{name}.py")
    if forks:  # not a process that has threads
        python(path)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 0


ARGUMENTS = {"fp16": False, "n_gpu": 1, "world_size": 1, "max_grad_norm": 1.0}
X = torch.linspace(-1, 1, 4 * 16 * 8).reshape(4, 16, 8)


def model():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 12), torch.nn.SiLU(), torch.nn.Linear(12, 4))
    iso.convert(made, grad_order="leaf16")
    return made


def run(made, optimizer, callback, cut, begin=True, **changes):
    """One step as the Trainer makes it: events in its order, and clipping between the last backward and the step."""
    args, state = SimpleNamespace(**{**ARGUMENTS, **changes}), SimpleNamespace(log_history=[])
    others = {"model": made, "optimizer": optimizer}
    if begin:
        callback.on_train_begin(args, state, None, **others)
    for part in X.split(cut):
        made(part).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(made.parameters(), args.max_grad_norm)
    callback.on_pre_optimizer_step(args, state, None, **others)
    optimizer.step()
    callback.on_optimizer_step(args, state, None, **others)
    made.zero_grad()
    return args, state, others


def test_steps_have_the_same_bits_and_are_clipped():
    found = {}
    for cut in (4, 2, 1):
        made, callback = model(), iso.TrainerCallback()
        args, state, others = run(made, torch.optim.SGD(made.parameters(), 0.1), callback, cut)
        logs = {"grad_norm": 0.0}
        state.log_history.append(dict(logs))  # which the Trainer saves
        callback.on_log(args, state, None, logs=logs, **others)
        assert state.log_history == [logs]
        assert logs["grad_norm"] == callback.grad_norm > 1  # clipping had something to do
        callback.on_train_end(args, state, None, **others)
        assert not any(hasattr(p, "main_grad") for p in made.parameters())
        found[cut] = [p.detach() for p in made.parameters()]
    moved = [x - y.detach() for x, y in zip(found[4], model().parameters(), strict=True)]
    assert sum(float(x.square().sum()) for x in moved) ** 0.5 == pytest.approx(0.1, rel=1e-4)  # lr * max_grad_norm
    for cut in (2, 1):
        assert all(same(x, y) for x, y in zip(found[4], found[cut], strict=True))


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_that_is_none_clips_nothing(limit):
    made, callback = model(), iso.TrainerCallback()
    run(made, torch.optim.SGD(made.parameters(), 0.1), callback, 4, max_grad_norm=limit)
    moved = [(x - y).detach() for x, y in zip(made.parameters(), model().parameters(), strict=True)]
    assert sum(float(x.square().sum()) for x in moved) ** 0.5 == pytest.approx(0.1 * callback.grad_norm, rel=1e-4)


def test_an_optimizer_of_other_parameters_is_found():
    made, other = model(), model()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(OptionError, match="as they were"):
        run(made, optimizer, iso.TrainerCallback(), 4)
    run(model(), optimizer, iso.TrainerCallback(check=False), 4)
    made = model()
    run(made, torch.optim.SGD(made.parameters(), 0.0), iso.TrainerCallback(), 4)  # a warm-up's first step


def test_later_steps_may_leave_parameters_as_they_are():
    """Looking at each would wait for the device; a schedule may end with steps too small for the precision."""
    made, callback = model(), iso.TrainerCallback()
    run(made, torch.optim.SGD(made.parameters(), 0.1), callback, 4)
    run(made, torch.optim.SGD(made.parameters(), 1e-30), callback, 4, begin=False)


@pytest.mark.parametrize(("scale", "looked_at"), [(-1.0, True), (0.0, False)])
def test_a_step_is_looked_at_where_a_gradient_is_not_zero(scale, looked_at):
    """By an element that has one, of either sign; a step of zeros says nothing."""
    made = torch.nn.Sequential(torch.nn.Linear(8, 1, bias=False))
    iso.convert(made)
    optimizer, callback = torch.optim.SGD(made.parameters(), 0.1), iso.TrainerCallback()
    args, given = SimpleNamespace(**ARGUMENTS), {"model": made, "optimizer": optimizer}
    callback.on_train_begin(args, None, None, **given)
    (made(torch.eye(1, 8)) * scale).sum().backward()
    callback.on_pre_optimizer_step(args, None, None, **given)
    optimizer.step()
    callback.on_optimizer_step(args, None, None, **given)
    assert callback.check is not looked_at


def test_nothing_is_left_of_the_buffers_of_a_shared_weight():
    made, callback = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), iso.TrainerCallback()
    made[1].weight = made[0].weight
    iso.convert(made, grad_order="leaf16")
    args, state, others = run(made, torch.optim.SGD(made.parameters(), 0.1), callback, 4)
    assert made[1].main_grads
    callback.on_train_end(args, state, None, **others)
    assert not any(layer.main_grads for layer in made)


@pytest.mark.parametrize(("name", "value"), [("fp16", True), ("n_gpu", 2), ("world_size", 2)])
def test_what_has_no_buffers_is_refused(name, value):
    made = model()
    with pytest.raises(OptionError, match=r"bf16|GradientTree"):
        run(made, torch.optim.SGD(made.parameters(), 0.1), iso.TrainerCallback(), 4, **{name: value})


def test_parameters_and_gradients_that_are_not_isogemms_are_refused():
    made = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(4))
    with pytest.raises(OptionError, match=r"1\.weight, 1\.bias"):
        iso.TrainerCallback().on_train_begin(SimpleNamespace(**ARGUMENTS), None, None, model=made)
    assert not any(hasattr(p, "main_grad") for p in made.parameters())
    made, callback = model(), iso.TrainerCallback()
    args = SimpleNamespace(**ARGUMENTS)
    callback.on_train_begin(args, None, None, model=made)
    made[1].weight.square().sum().backward()  # beside the layer
    with pytest.raises(OptionError, match=r"\.grad of 1\.weight"):
        callback.on_pre_optimizer_step(args, None, None, model=made)


def test_the_callback_is_loaded_where_it_is_asked_for():
    assert issubclass(iso.TrainerCallback, transformers.TrainerCallback)
    assert "TrainerCallback" in dir(iso)
    assert "TrainerCallback" not in iso.__all__
