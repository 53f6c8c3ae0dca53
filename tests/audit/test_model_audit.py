"""The audit of a whole model: it finds what is broken on purpose, and names the place."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import isogemm.torch  # noqa: E402
from isogemm import audit  # noqa: E402
from isogemm.audit.transformer.ranks import compared, joined  # noqa: E402
from isogemm.audit.transformer.relations import RELATIONS, ModelScope, not_promised  # noqa: E402
from isogemm.audit.transformer.runs import STRIDE, Prompts, prompt_length  # noqa: E402
from isogemm.audit.transformer.subject import Subject  # noqa: E402
from isogemm.audit.transformer.trace import Trace, first_difference  # noqa: E402
from isogemm.errors import DTypeError, LimitError, OptionError, ShapeError  # noqa: E402

SMALL = {"tokens": 11, "batches": (2, 3), "chunks": (4, 16), "micro_batches": (1, 2)}


class Exact(torch.nn.Module):
    """Rows of a table and elementwise operations in float64: nothing that could depend on the batch."""

    def __init__(self, fault=""):
        super().__init__()
        self.config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=6, num_attention_heads=1, num_hidden_layers=1, max_position_embeddings=128
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(64, 64)
        self.middle, self.last, self.fault = Middle(fault), torch.nn.Tanh(), fault

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False):
        x = self.middle(self.embed(input_ids))
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.last(x))


class ExactForCausalLM(Exact):
    pass


class Middle(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.inner = fault, torch.nn.Identity()

    def forward(self, x):
        y = x * 2
        if self.fault == "batch" and len(x) > 1:
            y = y.exp2().log2()
        if self.fault == "tokens" and x.shape[1] == 4:
            y = y + torch.where(torch.arange(64) == 5, 1e-3, 0.0)
        if self.fault == "likeliest" and len(x) > 1:
            y = torch.where(torch.arange(64) == 5, 99.0, y.clamp(max=1))
        if self.fault == "experts":  # every token twice, in an order of its own
            rows = torch.cat((y.flatten(0, -2), y.flatten(0, -2) + 1))
            order = rows.sum(1).argsort()
            changed = rows[order] * (1 + 2**-20 if len(x) > 1 else 1)
            y = changed[order.argsort()].view(2, *y.shape).sum(0)
        return self.inner(y) + 1


def statuses(report, mode="plain"):
    return {r.relation: r.status for r in report.providers[mode].relations.values()}


def test_a_model_without_faults_holds():
    report = audit.model(ExactForCausalLM(), mode="plain", **SMALL)
    assert set(statuses(report).values()) == {"held", "changed"}
    assert [name for name, s in statuses(report).items() if s == "changed"] == ["micro-batches"]  # .grad is a sum


def test_what_invariant_does_not_promise_is_reported_and_not_required():
    """Sums in .grad are torch's. Asked for alone, they are what is asked for."""
    relations = ["rerun", "population", "micro-batches"]
    report = audit.model(ExactForCausalLM(), mode="invariant", relations=relations, **SMALL)
    assert statuses(report, "invariant") == {"rerun": "held", "population": "held", "micro-batches": "changed"}
    assert report.ok
    assert (report.held("invariant"), report.exit_status) == (True, 0)
    *_, entry = report.to_dict()["providers"][0]["relations"]
    assert entry["not_promised"]["changed"] == entry["changed"] == 1
    assert "changed, not promised" in str(report)
    assert "no bit changed that is promised; " in str(report)
    assert "not promised, and changed: micro-batches in 1 case (micro-batches add up in .grad" in str(report)
    alone = audit.model(ExactForCausalLM(), mode="invariant", relations=["micro-batches"], **SMALL)
    assert (alone.ok, alone.exit_status) == (False, 1)
    faulty = audit.model(ExactForCausalLM("tokens"), mode="invariant", relations=["prefill", "micro-batches"], **SMALL)
    assert (faulty.ok, faulty.exit_status) == (False, 1)


@pytest.mark.parametrize("mode", ["plain", "invariant"])
def test_a_scope_is_in_force_in_every_call_of_its_mode(mode):
    model, seen = ExactForCausalLM(), []
    model.embed.register_forward_hook(lambda *_: seen.append(isogemm.torch.active()))
    audit.model(model, mode=mode, relations=["rerun", "micro-batches"], **SMALL)
    assert set(seen) == {mode == "invariant"}


def test_what_is_promised():
    scope = ModelScope(11)
    free = {
        (mode, attention): {
            (name, params.get("pad"))
            for name, relation in RELATIONS.items()
            for params in relation.cases(scope)
            if not_promised(mode, name, params, attention)
        }
        for mode in ("plain", "invariant", "convert")
        for attention in ("sdpa", "eager")
    }
    sums = {("micro-batches", None)}
    assert free.pop(("invariant", "sdpa")) == sums
    assert free.pop(("invariant", "eager")) == sums | {("left-padding", 3), ("left-padding", 29), ("decode", 29)}
    assert not any(free.values())


def test_a_batch_dependent_operator_is_named():
    report = audit.model(ExactForCausalLM("batch"), mode="plain", relations=["rerun", "population", "prefill"], **SMALL)
    assert statuses(report) == {"rerun": "held", "population": "changed", "prefill": "held"}
    (drift,) = report.drifts("plain")
    assert (drift.module, drift.kind, drift.what) == ("middle", "Middle", "output")
    assert drift.case.params == {"batch": 2}
    assert drift.note == "the second run calls aten.exp2.default, aten.log2.default more often"
    assert drift.tokens == 11
    assert 0 < drift.tokens_changed <= 11
    assert drift.sequence == 0


def test_an_operator_whose_rows_are_in_another_order_is_named():
    report = audit.model(ExactForCausalLM("experts"), mode="plain", relations=["rerun", "population"], **SMALL)
    assert statuses(report) == {"rerun": "held", "population": "changed"}
    (drift,) = report.drifts("plain")
    assert (drift.module, drift.operator, drift.note) == ("middle", "aten.mul.Tensor", "")


def test_the_first_token_and_the_largest_difference_are_named():
    report = audit.model(ExactForCausalLM("tokens"), mode="plain", relations=["prefill"], **SMALL)
    (drift,) = report.drifts("plain")
    assert drift.case.params["chunk"] == 4
    assert (drift.module, drift.token, drift.tokens_changed) == ("middle", 0, 8)  # 11 tokens are 4 + 4 + 3
    assert "aten.add.Tensor more often" in drift.note  # so which of them differ is not known
    assert drift.largest == pytest.approx(1e-3, rel=1e-2)
    assert report.providers["plain"].relations["prefill"].changed_outputs == 16  # with a dynamic and a static cache


def test_tokens_whose_likeliest_next_one_differs_are_counted():
    report = audit.model(ExactForCausalLM("likeliest"), mode="plain", relations=["population"], **SMALL)
    (drift,) = report.drifts("plain")
    assert drift.argmax_changed == drift.tokens_changed == 11
    assert "argmax differs at 11" in str(drift)


def test_report_as_json_page_and_text(tmp_path):
    report = audit.model(ExactForCausalLM("batch"), mode="plain", relations=["population"], **SMALL)
    content = json.loads(report.write_json(tmp_path / "r.json").read_text())
    assert content["schema"] == "isogemm.model_audit.v1"
    assert not content["ok"]
    (relation,) = content["providers"][0]["relations"]
    assert relation["meaning"] == "a prompt alone, and in a batch"
    assert relation["drifts"][0]["module"] == "middle"
    agreement = content["providers"][0]["agreement"]
    assert agreement["sweep"] == [1, 2, 3]
    assert {(c["m"], c["other"]) for c in agreement["cells"] if c["equal"] == c["outputs"]} == {
        (1, 1), (2, 2), (2, 3), (3, 2), (3, 3),
    }  # fmt: skip
    assert len(agreement["cells"]) == 9
    page = report.write_html(tmp_path / "r.html").read_text()
    assert "Does the model keep its bits?" in page
    assert "first difference in middle (Middle)" in page


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "plane"}, OptionError, "plain"),
        ({"relations": ["decoder"]}, OptionError, "decode"),
        ({"mode": []}, OptionError, "mode"),
        ({"require": ["convert"], "mode": "plain"}, OptionError, "require"),
        ({"batches": ()}, OptionError, "batches"),
        ({"chunks": (0,)}, OptionError, "chunks"),
        ({"tokens": 64}, LimitError, "63"),
        ({"prompts": np.zeros((2, 100), int)}, ShapeError, "at least"),
        ({"prompts": np.ones((3, 100))}, DTypeError, "prompts: limit: token ids, integers; got: float64"),
        ({"prompts": np.full((3, 100), 64)}, OptionError, "ids of prompts: limit: 0 to 63"),
        ({"prompts": [[1, 2], [3]]}, ShapeError, "prompts: limit: rows of one length"),
        ({"prompts": "hello"}, DTypeError, "prompts: limit: token ids"),
        ({"batches": 2}, OptionError, "batches: limit: whole numbers of at least 2; got: 2"),
        ({"require": "plane"}, OptionError, "require: .* got: 'plane'"),
        ({"seed": "a"}, OptionError, "seed: limit: a whole number"),
    ],
    ids=str,
)
def test_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        audit.model(ExactForCausalLM(), **{**SMALL, "mode": "plain", **options})


def test_a_model_of_few_positions_learns_from_shorter_prompts():
    model, lengths = ExactForCausalLM(), []
    model.config.max_position_embeddings = 40
    model.middle.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    report = audit.model(model, mode="plain", relations=["rerun", "micro-batches"], **SMALL)
    assert statuses(report) == {"rerun": "held", "micro-batches": "changed"}
    assert set(lengths) == {11, 32}
    with pytest.raises(LimitError, match="limit: 19 for this model; got: 20"):
        audit.model(model, mode="plain", **{**SMALL, "tokens": 20})


def test_the_model_is_left_as_it_was():
    model = ExactForCausalLM().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    audit.model(model, mode="plain", relations=["population", "micro-batches"], **SMALL)
    assert model.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_of_the_model_is_a_failed_case():
    model = ExactForCausalLM()
    model.embed.register_forward_hook(lambda m, a, y: 1 / 0 if y.shape[0] == 3 else None)
    result = audit.model(model, mode="plain", relations=["population"], **SMALL).providers["plain"]
    assert result.relations["population"].failed == 1
    assert "ZeroDivisionError" in result.relations["population"].reason
    assert result.status == "failed"


def test_runs_cover_every_token_once():
    prompts = Prompts.draw(8, 11, 64, 0)
    runs = [prompts.batch([3, 0]), prompts.padded("left", 5, 3), prompts.padded("right", 5, 3)]
    runs += [prompts.chunks([4, 4, 3], "dynamic"), prompts.chunks([5, *[1] * 6], "static", 3, 5)]
    for run in runs:
        tokens = np.concatenate([s.tokens[s.tokens >= 0] for s in run.steps])
        assert sorted(tokens) == list(range(11)), run.text
        for step in run.steps:
            b, t = np.nonzero(step.tokens >= 0)
            assert (step.ids[b, t] == prompts.ids[step.tokens[b, t] // STRIDE, step.tokens[b, t] % STRIDE]).all()
            if step.positions is not None:
                assert (step.positions[b, t] == step.tokens[b, t] % STRIDE).all()
                assert (step.mask[:, -step.ids.shape[1] :][b, t] == 1).all()
    micro = prompts.micro_batches(2, 8)
    assert len(micro.steps) == 4
    assert (prompts.labels(micro.steps[1]) == prompts.ids[2:4, 1:12]).all()


def test_no_case_compares_a_run_with_itself_but_the_one_of_the_same_call_and_no_two_compare_the_same():
    scope = ModelScope(11)
    prompts = Prompts.draw(scope.sequences, 64, 64, 0)
    cases = [(relation, params) for relation in RELATIONS.values() for params in relation.cases(scope)]
    pairs = [(relation.name, *relation.runs(prompts, scope, params)) for relation, params in cases]
    assert [name for name, one, other in pairs if one == other] == ["rerun"]
    assert len({(one.text, other.text) for _, one, other in pairs}) == len(cases) > 40


def test_ranks_are_compared_with_their_part_and_the_first_module_of_all_is_named():
    want = {"up": torch.arange(8.0).view(2, 4), "down": torch.ones(2, 3), "logits": torch.zeros(2, 5)}
    part = want | {"up": want["up"][:, 2:]}
    assert compared(want, part, 1).tolist() == [-1, 0, 10]
    off = part | {"down": want["down"] + 1, "logits": -want["logits"]}
    outcomes = [compared(want, each, 1).tolist() for each in (part | {"logits": off["logits"]}, part, off)]
    found = joined(3, "tree4", list(want), outcomes)
    assert (found.first, found.differing, found.logits) == ("down", 20, 30)


def test_prompts_are_no_size_of_the_model():
    config = transformers.LlamaConfig(hidden_size=68, intermediate_size=67, num_attention_heads=1)
    assert prompt_length(67, config) == 69


def test_heads_are_not_taken_for_tokens():
    """16 heads and chunks of 16 tokens: attention's scores are aligned by a reading that all steps share."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double().eval()
    subject, prompts = Subject("plain", model), Prompts.draw(2, 67, 64, 0)
    whole, parts = prompts.batch([0]), prompts.chunks([16, 16, 16, 16, 3], "dynamic")
    traces = []
    for run in (whole, parts):
        trace = Trace(model, inside="model.layers.0.self_attn")
        subject.outputs(run, trace)
        traces.append({key: [(n, {k: v.round(decimals=6) + 0.0 for k, v in f.items()}) for n, f in rows]
                       for key, rows in trace.rows.items()})  # fmt: skip
        trace.rows = traces[-1]
        traces[-1] = trace
    names = {key.operator for key in traces[0].rows}
    assert {"aten.bmm.default", "aten._softmax.default"} <= names
    assert first_difference(*traces) is None  # rounded: equal, where aligned rightly
    traces[1].rows = {k: [(n, {r: v + 1 for r, v in f.items()}) for n, f in rows] for k, rows in traces[1].rows.items()}
    assert first_difference(*traces) is not None


def test_compiled_outputs_are_compared_with_eager_ones(monkeypatch):
    """By a compiler that is right, and by one that is not; with prompts of four tokens the model has other bits."""
    model = ExactForCausalLM()
    cases = {"relations": ["compiled", "captured"], **SMALL}
    made = []

    def compiler(fault):
        def compile_(module, **options):
            made.append(options)
            return lambda **inputs: _with(fault, module, inputs)

        return compile_

    def _with(fault, module, inputs):
        outputs = module(**inputs)
        outputs.logits = outputs.logits + fault
        return outputs

    monkeypatch.setattr(torch, "compile", compiler(0.0))
    report = audit.model(model, mode="plain", **cases)
    assert statuses(report) == {"compiled": "held", "captured": "n/a"}
    assert made == [{"fullgraph": True, "dynamic": False}]  # once, and nothing that may run eagerly instead
    assert report.providers["plain"].relations["compiled"].cases == 4
    assert "CUDA" in report.providers["plain"].relations["captured"].reason
    monkeypatch.setattr(torch, "compile", compiler(1e-3))
    report = audit.model(model, mode="plain", **cases)
    (drift,) = report.drifts("plain")
    assert statuses(report)["compiled"] == "changed"
    assert "cannot be watched" in str(drift)
    assert drift.runs[1].endswith(", compiled")


def test_compiled_is_not_asked_of_a_routed_scope_nor_unasked():
    report = audit.model(ExactForCausalLM(), mode="invariant", relations=["compiled"], **SMALL)
    assert statuses(report, "invariant") == {"compiled": "n/a"}
    assert not {"compiled", "captured"} & set(statuses(audit.model(ExactForCausalLM(), mode="plain", **SMALL)))
