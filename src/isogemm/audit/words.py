"""What an audit found, in plain language: the same sentences on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from shlex import quote

from .cases import median_ulps, ulps_text
from .results import Agreement, ProviderResult, RelationResult, Results, Speed

_WORDS = {"held": "held", "changed": "bits changed", "failed": "failed", "absent": "did not run", "n/a": "n/a"}


def status_word(status: str) -> str:
    """A status as it is shown."""
    return _WORDS[status]


def examination(provider: str) -> str:
    """The command that looks for a mistake in a provider of one's own; "" for ours."""
    return f'isogemm doctor --call {quote(provider)} --signature "x, w"' if ":" in provider else ""


def asked(report: Results) -> str:
    """The question of an audit, in one sentence."""
    what = "do a model's numbers for a prompt keep their" if report.described else "does a row of a product keep its"
    return f"Asked: {what} bits, whatever else is computed with it and however the work is cut?"


def answered(report: Results) -> str:
    """What came of it, in one sentence."""
    kinds = {
        "held": "kept every bit: a result can be compared, cached and replayed, alone or in any batch",
        "changed": "did not: the same input gives other bits in other company, and near ties can turn",
        "failed": "failed, so nothing is said of it",
        "absent": "did not run",
    }
    names = {status: [p.name for p in report.providers.values() if p.status == status] for status in kinds}
    return (
        "Found: "
        + "; ".join(f"{', '.join(names[status])} {text}" for status, text in kinds.items() if names[status])
        + "."
    )


def measured(report: Results) -> str:
    """What was measured."""
    if report.described:
        return " ".join([report.described, *quantized(report)])
    o, sweep = report.options, report.options["sweep"]
    sources = {s["source"] for s in report.shapes}
    weights = (
        "random weights"
        if sources <= {"random"}
        else "weights of " + ", ".join(sorted(map(file_name, sources - {"random"})))
    )
    extent = f"{plural(len(o['relations']), 'relation')} on {plural(len(report.shapes), 'linear')}, {o['dtype']}"
    sizes = f"{len(sweep)} batch sizes from {min(sweep)} to {max(sweep)}" if len(sweep) > 1 else f"M = {sweep[0]}"
    inputs = f"activations {file_name(o['inputs'])}, seed {o['seed']}"
    return f"{extent}, {weights}, {inputs}, {sizes}. Outputs were compared bit for bit."


def quantized(report: Results) -> list[str]:
    """Which weights of a model were quantized, and which not, and why; nothing where none was to be."""
    if not report.quantized:
        return []
    formats, floats = report.quantized["formats"], report.quantized["floats"]
    weights, others = report.quantized["weights"], report.quantized["float_weights"]
    share = f", {weights / (weights + others):.1%} of their weights" if floats and weights else ""
    made = ", ".join(f"{n} to {fmt}" for fmt, n in formats.items()) or "none"
    count = sum(formats.values()) + len(floats)
    lines = [f"Of {plural(count, 'Linear')}, quantized: {made}{share}."]
    alike: dict[str, list[str]] = {}
    for name, why in floats.items():
        alike.setdefault(why.removeprefix(f"{name}: "), []).append(name)
    for why, names in alike.items():
        rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"Floats: {names[0]}{rest} ({why}).")
    return lines


def file_name(path: str) -> str:
    """The name of a file without its folders, with its package's where it lies in an installed one."""
    parts = PurePath(path).parts
    package = parts[parts.index("site-packages") + 1] if "site-packages" in parts[:-2] else ""
    return f"{package}/{parts[-1]}" if package else parts[-1]


def not_required(report: Results) -> str:
    """Which providers changed bits without being required to keep them, and how to require it; else empty."""
    found = [p.name for p in report.providers.values() if p.status == "changed" and p.name not in report.required]
    if not found:
        return ""
    names, every = ", ".join(found), ",".join([*report.required, *found])
    return f"Not required, and bits changed: {names}. For exit status 1 then, add: --require {every}"


def not_run(report: Results) -> str:
    """Which providers had to run and did not, and why; else empty."""
    found = [f"{name} ({report.providers[name].reason or 'nothing applied'})" for name in report.missing]
    return f"Did not run, which is no pass: {'; '.join(found)}. Exit status {report.exit_status}" if found else ""


def inapplicable(result: ProviderResult) -> str:
    """Why the outputs of some relations are fewer than another provider's; empty where every case applies."""
    reasons = {r.relation: r.inapplicable for r in result.relations.values() if r.not_applicable}
    if not reasons:
        return ""
    why = "; ".join(f"{relation}: {reason}" for relation, reason in reasons.items())
    return f"n/a: cases that do not apply here, whose outputs are in no count ({why})"


def not_measured(report: Results) -> list[str]:
    """What the result does not say."""
    lines = [
        "Other shapes, values, processors, library versions and settings can give other results. Equal bits are no "
        "statement of accuracy.",
        "A difference in ULPs is relative to the output itself, so it is large where terms cancel and the output is "
        "near zero.",
    ]
    sampled = [
        f"{s['name']} ({s['columns_compared']:,} of {s['n']:,})"
        for s in report.shapes
        if s["columns_compared"] < s["n"]
    ]
    if sampled:
        lines.append("Compared on a sample of the output columns: " + ", ".join(sampled) + ".")
    load, cpus = report.environment.get("load"), report.environment.get("cpu", {}).get("usable")
    if len({s.provider for s in report.speeds}) > 1 and load is not None and load > cpus + 1:
        lines.append(f"The machine was busy (load {load} on {cpus} CPUs): the times are those of a busy machine.")
    return lines + report.notes


def provider_text(result: ProviderResult) -> str:
    """What was found about one provider."""
    outputs = result.compared
    changed = sum(r.changed_outputs for r in result.relations.values())
    broken = [r.relation for r in result.relations.values() if r.demanded == "changed"]
    excused = [r for r in result.relations.values() if r.excused]
    if result.status == "changed" and not broken:  # they alone were asked for
        broken, excused = [r.relation for r in excused], []
    failed = [r.relation for r in result.relations.values() if r.status == "failed"]
    if not outputs:
        return f"{status_word(result.status)}: {result.reason}" if result.reason else "nothing applied"
    compared = f"{outputs:,} outputs compared in {result.cases:,} cases"
    parts = [f"no bit changed{' that is promised' if excused else ''}; {compared}"]
    if broken:
        largest = max(r.max_ulp for r in result.relations.values())
        parts = [
            f"bits changed in {result.changed:,} of {result.cases:,} cases, {changed:,} of {outputs:,} outputs, "
            f"by a median of {median_ulps(result.histogram)} ULP and at most {ulps_text(largest)}",
            "not kept by " + ", ".join(broken),
        ]
    parts += [
        f"not promised, and changed: {r.relation} in {plural(r.excused, 'case')} ({r.unpromised})" for r in excused
    ]
    if failed:
        parts.append("failed: " + ", ".join(failed))
    if result.reason:
        parts.append(f"given up on {result.reason}")
    agreement = agreement_text(result.agreement)
    return "; ".join(parts + ([agreement] if agreement else []))


def agreement_text(agreement: Agreement) -> str:
    """Which batch sizes agree with which, as groups; empty where fewer than two were compared."""
    groups = groups_of(agreement)
    if sum(map(len, groups)) < 2:
        return ""
    if len(groups) == 1:
        return "all batch sizes agree"
    shown = " | ".join(ranges(group, agreement.sweep) for group in groups[:6])
    more = f" | and {len(groups) - 6} more" if len(groups) > 6 else ""
    return f"batch sizes fall into {len(groups)} groups of equal bits: {shown}{more}"


def groups_of(agreement: Agreement) -> list[list[int]]:
    """Batch sizes that agree fully with every other size of their group."""
    groups: list[list[int]] = []
    index = {m: i for i, m in enumerate(agreement.sweep)}
    for m, i in index.items():
        if not agreement.total[i, i]:
            continue
        for group in groups:
            if all(agreement.equal[i, index[g]] == agreement.total[i, index[g]] for g in group):
                group.append(m)
                break
        else:
            groups.append([m])
    return groups


def ranges(group: Sequence[int], sweep: Sequence[int]) -> str:
    """Batch sizes with neighbours in the sweep joined: ``1, 2, 7..256``."""
    runs: list[list[int]] = []
    for m in group:
        if runs and sweep.index(m) == sweep.index(runs[-1][-1]) + 1:
            runs[-1].append(m)
        else:
            runs.append([m])
    return ", ".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def relation_cases(result: RelationResult) -> str:
    """Cases that apply, and how many of them failed or do not."""
    extra = [f"{result.failed} failed"] if result.failed else []
    extra += [f"{result.not_applicable} n/a"] if result.not_applicable else []
    return f"{result.cases}" + (f" ({', '.join(extra)})" if extra else "")


def speed_by_m(report: Results, provider: str) -> dict[int, str]:
    """Time over the fastest provider's, by batch size: the geometric mean over the linears.

    Where intervals are too wide to tell faster from slower it says on how many of the linears. Empty where nothing
    else was timed.
    """
    if len({s.provider for s in report.speeds}) < 2:
        return {}
    speeds: dict[int, list[Speed]] = {}
    for s in report.speeds:
        if s.provider == provider:
            speeds.setdefault(s.m, []).append(s)
    return {m: _ratio(found) for m, found in speeds.items()}


def _ratio(speeds: Sequence[Speed]) -> str:
    mean = math.exp(sum(math.log(s.against_fastest) for s in speeds) / len(speeds))
    unclear = sum(s.verdict == "AMBIGUOUS" for s in speeds)
    if not unclear:
        return f"{mean:.2f}x"
    where = "" if unclear == len(speeds) else f" on {unclear} of {len(speeds)} linears"
    return f"about {mean:.2f}x (AMBIGUOUS{where})"


def plural(count: int, word: str) -> str:
    """``1 linear``, ``2 linears``."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")
