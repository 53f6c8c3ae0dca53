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


@pytest.mark.parametrize("forgotten", [2, 3])
@pytest.mark.parametrize("which", ["all", "norms alone", "embeddings alone"])
def test_a_later_step_is_told_too(forgotten, which):
    """Gradients of an earlier step stand in .grad then, which zero_grad(set_to_none=False) keeps as zeros."""
    model, x = build(), X
    if which == "norms alone":
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
    elif which == "embeddings alone":
        model, x = torch.nn.Sequential(torch.nn.Embedding(8, 8)), torch.tensor([1, 2, 1])
        iso.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iso.use_main_grad(model)
    for _ in range(1, forgotten):
        model(x).square().sum().backward()
        iso.collect_main_grad(model)
        optimizer.step()
        optimizer.step()  # once more with what was collected
        optimizer.zero_grad(set_to_none=False)
    before = [p.detach().clone() for p in model.parameters()]
    model(x).square().sum().backward()
    with pytest.raises(OptionError, match=r"that nobody has collected.*an earlier step.*collect_main_grad"):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
    iso.collect_main_grad(model, zero=False)  # collected, though the sums stay
    optimizer.step()
    iso.use_main_grad(model)
    optimizer.step()
    model(x).square().sum().backward()
    for _, p, total in iso.main_grads(model):
        p.grad = total.to(p.dtype)
    optimizer.step()


def test_a_model_of_micro_batches_inside_of_leaves_is_told_at_the_second():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    iso.convert(model, grad_order="leaf16")
    iso.use_main_grad(model)
    x = torch.randn(40, 8)
    for part in (x[:16], x[16:32], x[32:]):  # the last one may be shorter
        model(part).square().sum().backward()
    kept = [p.main_grad.clone() for p in model.parameters()]
    with pytest.raises(OptionError, match=r"multiples of 16 rows.*got: 40 rows, of which the last 8.*leaf8.*48"):
        model(x).square().sum().backward()
    assert all(torch.equal(p.main_grad, k) for p, k in zip(model.parameters(), kept, strict=True))
    iso.collect_main_grad(model)
    for part in (x[:32], x[32:]):  # the next step begins anew
        model(part).square().sum().backward()
    assert all(torch.equal(p.main_grad, k) for p, k in zip(model.parameters(), kept, strict=True))


def test_a_buffer_of_before_is_taken_where_it_fits():
    model = build()
    iso.use_main_grad(model)
    weights = [model[0].weight, model[1].weight, model[2].weight]
    before = [w.main_grad for w in weights]
    model.bfloat16()  # which sums of gradients do not become
    iso.use_main_grad(model)
    assert [id(w.main_grad) for w in weights] == [id(x) for x in before]
    weights[0].main_grad = before[0].bfloat16()
    weights[1].main_grad = before[1].to("meta")
    weights[2].data, model[2].bias.data = torch.ones(6, 8).bfloat16(), torch.ones(6).bfloat16()
    iso.use_main_grad(model)
    for w in weights:
        found = w.main_grad
        assert (found.shape, found.dtype, found.device) == (w.shape, torch.float32, w.device)
        assert not found.any()


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
    from tests.torch.model.tiny import build, tokens

    model = build(num_hidden_layers=1)
    iso.convert(model)
    iso.use_main_grad(model)
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(2, 5)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    with pytest.raises(OptionError, match=r"collect_main_grad.*Trainer"):
        transformers.Trainer(model, arguments, train_dataset=data).train()
