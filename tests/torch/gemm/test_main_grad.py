"""Float32 buffers for gradients where something else looks for `.grad`: said before a rank or a step goes on."""

from __future__ import annotations

import datetime

import pytest

from isogemm.errors import OptionError

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402

DDP = torch.nn.parallel.DistributedDataParallel


@pytest.fixture(scope="module")
def ranks():
    """A world of one process; DistributedDataParallel does all that it does in larger ones."""
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    short = datetime.timedelta(seconds=20)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=short
    )
    yield
    torch.distributed.destroy_process_group()


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    iso.convert(model)
    return model


X = torch.ones(3, 8)


@pytest.mark.parametrize("order", ["before", "after", "on the wrapper", "norms alone"])
def test_ddp_is_refused_before_a_gradient_is_lost(ranks, order):
    model = build()
    if order == "norms alone":
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        iso.convert(model, parts=("norm",))
    if order in ("before", "norms alone"):
        iso.use_main_grad(model)
    wrapped = DDP(model)
    if order == "after":
        iso.use_main_grad(model)
    with pytest.raises(OptionError, match=r"DistributedDataParallel.*collect_main_grad.*all_reduce"):
        iso.use_main_grad(wrapped) if order == "on the wrapper" else wrapped(X)
    if order == "on the wrapper":
        assert not any(hasattr(p, "main_grad") for p in model.parameters())
        wrapped(X).sum().backward()  # as always
        assert model[0].weight.grad is not None
    else:  # alone it goes on
        model(X).sum().backward()
        assert iso.collect_main_grad(model)


def test_what_the_error_says_instead(ranks):
    model = build()
    iso.use_main_grad(model)
    model(X).square().sum().backward()
    iso.collect_main_grad(model)
    want = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_without_gradients_is_an_error(cls):
    model = build()
    optimizer = cls(model.parameters(), lr=0.1)  # made before: it has the parameters all the same
    iso.use_main_grad(model)
    optimizer.step()  # nothing was added up: nothing is lost
    before = [p.detach().clone() for p in model.parameters()]
    model(X).square().sum().backward()
    with pytest.raises(OptionError, match=rf"step of {cls.__name__}.*collect_main_grad\(model\) before"):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
    iso.collect_main_grad(model)
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0])
    optimizer.zero_grad()
    optimizer.step()
    model(X).square().sum().backward()
    optimizer.reads_main_grad = True
    optimizer.step()


def test_other_models_and_frozen_parameters_step_as_always():
    ours, other = build(), torch.nn.Linear(8, 4)
    iso.use_main_grad(ours)
    ours(X).sum().backward()
    other(X).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    ours.requires_grad_(False)
    torch.optim.SGD([*ours.parameters(), *other.parameters()], lr=0.1).step()


def test_a_trainer_is_told_at_its_first_step(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.torch.model.test_huggingface import build, tokens

    model = build(num_hidden_layers=1)
    iso.convert(model)
    iso.use_main_grad(model)
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(2, 5)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    with pytest.raises(OptionError, match=r"collect_main_grad.*Trainer"):
        transformers.Trainer(model, arguments, train_dataset=data).train()
