"""A whole model turned into one of isogemm's layers: everything that can be, or nothing and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from ...base import arguments
from ...contract.spec import Contract, ContractLike
from ...errors import DTypeError, OptionError
from ...formats.blocks import BlockFormat
from ..device import DTYPES
from ..quant import convert as quantizing
from ..quant.convert import Formats
from . import activations as functions
from . import recognition
from .huggingface import experts, inline, loss, rotary, whole
from .huggingface import recognition as transformers_parts
from .huggingface.modules import NAME
from .layers import AnyNorm, Converted, Linear, Transposed, checked
from .merging import GatedMLP, Merging
from .names import prefixes
from .own_code import OwnCode
from .recognition import Looks, Match
from .report import Conversion, refuse_open, warn_open
from .watch import watch

PARTS = ("linear", "norm", "embedding", "mlp", "activation", "attention", "rope", "experts", "loss")

ALREADY = "isogemm's already, as it is"

# Modules of torch that read the weights of Linear modules inside them and never call those.
_READS_WEIGHTS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


def convert(
    module: Any,
    *,
    parts: Sequence[str] | str = PARTS,
    contract: ContractLike | None = None,
    grad_order: str = "leaf4096",
    leave: Sequence[str] = (),
    strict: bool = False,
    fuse: bool = False,
    quantize: Formats | None = None,
    fallback: str | BlockFormat | None = None,
    activations: str | None = None,
    progress: bool | None = None,
    tp: Any = None,
) -> Conversion:
    """Turn what a model is made of into isogemm's layers, in place, or change nothing and say why.

    A module changes its class and stays the object it is: parameters (tied ones too), buffers, hooks, the optimizer's
    references, training mode and modules used in several places all stay. The new class is a subclass of the old one.
    Where weights are quantized, another object takes a Linear's place, with its bias and its hooks.

    Parameters
    ----------
    module : torch.nn.Module
    parts : sequence of str
        What to convert, by default all of it.

        - ``linear``: torch.nn.Linear.
        - ``norm``: torch.nn.RMSNorm and LayerNorm, and modules that compute an RMSNorm, as in transformers.
        - ``embedding``: torch.nn.Embedding.
        - ``mlp``: modules that compute ``down_proj(silu(gate_proj(x)) * up_proj(x))``, and SiLU.
        - ``activation``: modules that compute a function of each element whose kernels on a CPU have several forms
          (GELU, Sigmoid, Mish, ELU, Softplus and others, also transformers').
        - ``attention``: the attention function of a transformers model and its masks. The model gets a copy of its
          configuration, since others may share that. Where attention cannot be that function: the model and its layers,
          whose own code stays.
        - ``rope``: rotary embeddings of transformers models, and the attention modules that use them.
        - ``experts``: mixtures of experts of transformers models: experts, routers, and what a block has besides.
        - ``loss``: what a causal language model of transformers computes where it is given labels.
    contract, grad_order
        As in `Linear`, for all products; the order also for the gradients of norms. Attention takes the arithmetic.
    leave : sequence of str
        Patterns (``"lm_head"``, ``"encoder.*"``) of module names to leave as they are, with all inside them.
    strict : bool
        Refuse a model in which anything would stay that may change bits, and that neither `leave` nor `parts` names.
        Without it such a model is converted as far as it goes, and one warning (`LeftToTorch`) lists the rest by kind.
    fuse : bool
        Without gradients, q_proj, k_proj and v_proj are one product, and gate_proj and up_proj: the same bits, fewer
        launches. Their weights become views of one tensor each, with `tp` a rank's parts of them. Quantized ones stay
        apart.
    quantize : str, BlockFormat, or dict of patterns to these and None
        The format of the weights of Linear modules (also of those that are isogemm's already), which become
        `QuantizedLinear`: ``"Q4_K"``, or ``{"lm_head": "Q6_K", "*": "Q4_K"}``; the first pattern that fits a module's
        name, or one that it is inside of, counts. Weights are freed one by one. A weight that another module needs as
        it is (an output layer tied to an embedding) stays unless a pattern other than ``*`` names it: then it has a
        quantized copy of its own.
    fallback : str
        The format for rows that are no whole number of blocks, or ``"keep"`` to leave those weights floats.
    activations : str
        Of quantized weights, as in `isogemm.linear`.
    progress : bool
        Show how far quantizing is; by default for large models on a terminal.
    tp : DeviceMesh, ProcessGroup, Ranks or 1
        Cut the model between these ranks by its own ``tp_plan``, with `isogemm.torch.distributed`: parameters keep a
        part of their values. 1 is a process alone, whose sums are in the same tree. A model that the ranks do not
        divide is an error, and then converted and not cut.

    Returns
    -------
    Conversion

    Raises
    ------
    OptionError
        A Linear that cannot be converted faithfully and is not in `leave`: a subclass, one with a forward method of its
        own or compiled, or one inside a torch module that reads its weights without calling it (MultiheadAttention,
        TransformerEncoderLayer). The message lists them all. Also an unknown part or format, and, with `strict`, what
        would stay torch's and may change bits.
    ShapeError
        Rows that are no whole number of blocks, without `fallback`; the message lists the modules.
    FormatError
        A weight that cannot be quantized: it holds an infinity or a NaN, or a scale is too large for float16.
    DTypeError
        Weights of an unsupported dtype; an argument of another type.
    ContractError
        No such contract or order.

    Determinism
    -----------
    Converted modules are as `Linear` and `isogemm.torch.reductions`. Modules that are not known stay torch's and are
    in the report, which lists modules and cannot see functions: `isogemm.torch.coverage` can.
    """
    if torch.is_inference_mode_enabled():  # what is looked at and made there would be of no use outside
        with torch.inference_mode(False), torch.no_grad():
            return convert(
                module, parts=parts, contract=contract, grad_order=grad_order, leave=leave, strict=strict, fuse=fuse,
                quantize=quantize, fallback=fallback, activations=activations, progress=progress, tp=tp,
            )  # fmt: skip
    arguments.of_type("module", module, torch.nn.Module, "a torch.nn.Module", "the model itself")
    _refuse_scripts(module)
    fuse, strict = arguments.flag("fuse", fuse), arguments.flag("strict", strict)
    if tp is not None and quantize is not None:
        raise OptionError("tp", limit="without quantize", value="both", nearest="convert(model, tp=tp)")
    chosen, order = checked(contract, grad_order)
    leave = _patterns(module, arguments.strings("leave", leave, "['lm_head']"))
    wanted = _parts(parts)
    plan = _look(module, wanted, leave)
    _refuse(plan.refused, plan.unlike)
    if strict:
        refuse_open(module, _open(plan))
    _check_dtypes(plan)
    plan.quantization = _quantization(module, plan, chosen, quantize, fallback, activations)
    _carry_out(plan, chosen, order)
    quantized = {}
    if plan.quantization:
        # Weights go one by one: nothing else may hold them.
        plan.found = [(name, None, known) for name, _, known in plan.found]
        quantized = plan.quantization.run(module, progress)
    before = transformers_parts.switch(module) if plan.attention else []
    for child in plan.losses.values():
        child.loss_function = loss.causal_lm_loss
    if tp is not None:
        from ..distributed.models import cut

        cut(module, tp)
    for child in module.modules() if fuse else ():
        if isinstance(child, Merging):
            child.merge()
    watch(module, before)
    said = None if chosen is None else str(chosen)
    how = {"parts": list(wanted), "contract": said, "grad_order": order, "leave": list(leave)}
    vars(module).setdefault(quantizing.CALLS, []).append(how)
    if "" in transformers_parts.models(module):
        quantizing.remember(module, own=bool(plan.attention))
    report = _report(module, plan, quantized)
    warn_open(report, type(module).__name__)
    return report


@dataclass(slots=True)
class _Plan:
    """What is to be done with each module."""

    found: list[tuple[str, Any, Match]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)  # models that compute one
    unlike: str = ""  # why a model that computes attention by itself does not keep its own code
    rotates: bool = False  # attention modules that become RotaryAttention
    rotates_otherwise: bool = False  # others
    quantization: quantizing.Quantization | None = None


def _refuse_scripts(module: Any) -> None:
    """Raise OptionError: a part of the model is TorchScript, which has no class that could be another one."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            value = f"{type(child).__name__}, {name or 'the model itself'}"
            nearest = "convert(model), then torch.jit.trace or torch.compile"
            raise OptionError("module", limit="modules of Python's, no TorchScript", value=value, nearest=nearest)


def _parts(parts: Sequence[str] | str) -> tuple[str, ...]:
    chosen = arguments.strings("parts", parts, "'all'")
    if chosen == ("all",):
        return PARTS
    for part in chosen:
        if part not in PARTS:
            nearest = arguments.nearest(part.lower(), PARTS, "all")
            raise OptionError("part of a model", limit=" or ".join(PARTS), value=part, nearest=nearest)
    return chosen


def _look(module: Any, parts: tuple[str, ...], leave: Sequence[str]) -> _Plan:
    """Everything that is to be changed, before anything is."""
    plan, inside, looks = _Plan(), set(), Looks()
    attention, widths = transformers_parts.attention_modules(module), rotary.widths(module)
    odd = rotary.halved(module) if attention else ""
    mixtures = experts.mixtures(module) | inline.stacked(module) if "transformers" in sys.modules else {}
    own, plan.unlike = _own(module, parts, leave, looks)
    mixtures |= own
    covered = whole.inside(module, own)
    heads = loss.heads(module) if "loss" in parts else {}
    plan.losses = {name: child for name, child in heads.items() if not _is_left(name, leave)}
    for name, child, outer in _walk(module):
        known = mixtures.get(name) or _known(child, widths, odd, looks)
        why = None if name in mixtures else _obstacle(child, outer, known)
        if _is_left(name, leave):
            if _has_weights(child) or known or child in attention.values():
                plan.left[name] = "in leave"
        elif isinstance(child, Converted):
            plan.left[name] = ALREADY
            if isinstance(child, GatedMLP):
                inside |= _gates(name, child)
        elif name in covered and (why is not None or known is None or known.layer is None):
            pass  # its own code runs in that of a layer or model around it
        elif why is not None and "linear" in parts:
            plan.refused[name] = why
        elif known is None:
            if _has_weights(child):
                plan.left[name] = f"{type(child).__name__} is not known here"
        elif id(child) in inside:
            pass  # an activation whose work its block does
        elif known.part not in parts:
            plan.left[name] = f"{known.part} is not among the parts"
        elif known.layer is None:
            plan.left[name] = known.why
        else:
            plan.found.append((name, child, known))
            if known.part == "mlp":
                inside |= {id(m) for m in child.children() if recognition.is_silu(m, looks)}
        if name in attention and known is not None and known.part == "rope":
            plan.rotates, plan.rotates_otherwise = True, plan.rotates_otherwise or name in plan.left
    if not covered or not covered.issuperset(attention):
        _plan_attention(module, plan, {n: x for n, x in attention.items() if n not in covered}, parts, looks)
    return plan


def _own(module: Any, parts: Sequence[str], leave: Sequence[str], looks: Looks) -> tuple[dict[str, Match], str]:
    """Models and layers that keep their own code, as their attention cannot have isogemm's function; or why not."""
    asked = "attention" in parts and transformers_parts.models(module)
    if not asked or not transformers_parts.refusal(module, looks):
        return {}, ""
    found, why = whole.whole(module, convert)
    left = [n for n in found if _is_left(n, leave)]
    return ({}, f"{left[0]} is in leave, and a model keeps its own code whole") if left else (found, why)


def _is_left(name: str, leave: Sequence[str]) -> bool:
    """Whether a module, or one that it is inside of, is to stay as it is."""
    return any(fnmatchcase(part, pattern) for part in prefixes(name) for pattern in leave)


def _gates(name: str, block: Any) -> set[int]:
    """The activations in a converted block, whose work it does: SiLU, unless somebody has put in another since."""
    found = [child for key, child in block._modules.items() if key in recognition.ACTIVATIONS]
    for child in found:
        if type(child).__name__ not in ("SiLU", "SiLUActivation"):
            raise OptionError(
                f"activation of {name}, which was converted", limit="SiLU, which the block computes itself",
                value=type(child).__name__, nearest="the model with that activation, then convert(model)",
            )  # fmt: skip
    return {id(child) for child in found}


def _patterns(module: Any, leave: Sequence[str]) -> tuple[str, ...]:
    """`leave`, and the first names of modules that it has by another one. A misspelt name, converted, is refused."""
    first = {id(child): name for name, child in module.named_modules()}
    names = {name: first[id(child)] for name, child in module.named_modules(remove_duplicate=False)}
    found = [[name for name in names if fnmatchcase(name, pattern)] for pattern in leave]
    for pattern, some in zip(leave, found, strict=True):
        if not some:
            nearest = arguments.nearest(pattern, names, "*")
            raise OptionError("leave", limit="patterns of modules' names", value=pattern, nearest=nearest)
    return (*leave, *dict.fromkeys(names[name] for some in found for name in some if names[name] != name))


def _known(child: Any, widths: frozenset[int], odd: str, looks: Looks) -> Match | None:
    if isinstance(child, Converted):  # nothing that is still to be done
        return None
    found = recognition.known(child, looks)
    if found is None and type(child).__module__.startswith("transformers."):
        found = transformers_parts.known(child, widths, odd, looks)
    return found or functions.known(child, looks)


def _plan_attention(module: Any, plan: _Plan, found: dict[str, Any], parts: tuple[str, ...], looks: Looks) -> None:
    """All attention modules of a model, or none: they share a mask."""
    if not found:
        if (names := transformers_parts.models(module)) and (why := transformers_parts.refusal(module, looks)):
            plan.left.setdefault(next(iter(names)), "; ".join(filter(None, (why, plan.unlike))))
        return
    if "attention" not in parts:
        why = "attention is not among the parts"
    elif left := [name for name in found if plan.left.get(name) == "in leave"]:
        why = f"attention has one mask for all layers, and {left[0]} is in leave"
    else:
        why = transformers_parts.refusal(module, looks)
    if not why and all("contract" in vars(x) and x.config._attn_implementation == NAME for x in found.values()):
        plan.left |= {name: ALREADY for name in found if name not in plan.left}
        return
    if not why:
        plan.attention = found
        return
    own, odd = inline.attends_itself(found)
    if own and "attention" in parts and not any(plan.left.get(name) == "in leave" for name in found):
        plan.found += [(name, found[name], known) for name, known in own.items()]
        return
    why = "; ".join(filter(None, (odd or why, plan.unlike)))
    for name in found:
        if name not in plan.left:
            plan.left[name] = why
        elif plan.left[name] not in ("in leave", why):
            plan.left[name] += f"; {why}"


def _refuse(refused: dict[str, str], unlike: str) -> None:
    if refused:
        reasons = [f"{name or '(the model)'}: {why}" for name, why in refused.items()]
        raise OptionError(
            "modules that cannot be converted",
            limit="torch.nn.Linear itself, called as a module",
            value="; ".join([*reasons, *filter(None, [unlike])]),
            nearest=f"leave={list(refused)}",
        )


def _check_dtypes(plan: _Plan) -> None:
    for name, child, _ in plan.found:
        for key, p in child._parameters.items():
            if p is not None and p.dtype not in DTYPES:
                what = f"dtype of {name}.{key}" if name else f"dtype of the {type(child).__name__}'s {key}"
                raise DTypeError(
                    what, limit="float32, bfloat16 or float16", value=p.dtype,
                    nearest="torch.float32, by model.float() before convert(model)",
                )  # fmt: skip


def _carry_out(plan: _Plan, contract: Contract | None, order: str) -> None:
    """Every module becomes what was found for it."""
    own = {name for name, _, known in plan.found if known.layer and issubclass(known.layer, OwnCode)}
    for name, child, known in plan.found:
        child.__class__ = known.layer
        if isinstance(child, functions.Activation):
            child.keep()
        if "inv_freq" in child._buffers:
            rotary.prepare(child, plan.rotates and not plan.rotates_otherwise)
        if isinstance(child, (Linear, Transposed, OwnCode)) or known.part == "experts":
            child.contract, child.grad_order = contract, order
        if isinstance(child, AnyNorm):  # a model's own code may make any number of rows of a token
            child.grad_order = order if own.isdisjoint(prefixes(name)) else "chain"
    for child in plan.attention.values():
        vars(child)["contract"] = None if contract is None else Contract(contract.arithmetic)  # its leaves are its own


def _quantization(
    module: Any, plan: _Plan, contract: Contract | None, formats: Formats | None,
    fallback: str | BlockFormat | None, activations: str | None,
) -> quantizing.Quantization | None:  # fmt: skip
    """What becomes of the weights of Linear modules: those that are found, and those that are isogemm's already."""
    if formats is None:
        if fallback is not None or activations is not None:
            what = "activations" if fallback is None else "fallback"
            raise OptionError(what, limit="with quantize", value="quantize is None", nearest="quantize='Q8_0'")
        return None
    found = {name: child for name, child, _ in plan.found if isinstance(child, torch.nn.Linear)}
    found |= {n: c for n, c in module.named_modules() if isinstance(c, Linear) and plan.left.get(n) == ALREADY}
    return quantizing.check(module, found, formats, fallback, activations, contract)


def _report(module: Any, plan: _Plan, quantized: dict[str, str]) -> Conversion:
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for name, _, known in plan.found:
        parts[known.part].append(name)
    parts["attention"] += plan.attention
    for name in quantized:
        if plan.left.pop(name, None):
            parts["linear"].append(name)
    converted = dict.fromkeys(name for names in parts.values() for name in names)
    parts["loss"] += plan.losses
    order = [name for name, _ in module.named_modules() if name in converted]
    floats = plan.quantization.floats if plan.quantization else {}
    by_part = {part: tuple(names) for part, names in parts.items()}
    return Conversion(module, tuple(order), plan.left, by_part, quantized, floats, _open(plan))


def _open(plan: _Plan) -> dict[str, str]:
    """What is left, unasked, and may change bits.

    The code of an attention module whose function is ours moves numbers between its projections and turns them, each
    element alone, where nothing else is called in it.
    """
    asked = {"in leave", ALREADY, *(f"{part} is not among the parts" for part in PARTS)}
    found = {name: why for name, why in plan.left.items() if why not in asked}
    kept = {name: child for name, child in plan.attention.items() if name not in {made for made, _, _ in plan.found}}
    for name, child in kept.items():
        if transformers_parts.moves_alone(child):
            found.pop(name, None)
        elif plan.left.get(name) not in asked:
            found.setdefault(name, f"the own code of {type(child).__name__} may compute more than it moves")
    return found


def _walk(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, the outermost module around it that reads weights itself) of all, each once."""
    outer: dict[str, Any] = {}
    for name, child in module.named_modules():
        parents = [outer[part] for part in prefixes(name)[1:] if part in outer]
        if isinstance(child, _READS_WEIGHTS):
            outer[name] = child
        yield name, child, parents[0] if parents else None


def _has_weights(module: Any) -> bool:
    return any(p is not None for p in module._parameters.values())


def _obstacle(child: Any, outer: Any, known: Match | None) -> str | None:
    """Why a module cannot be converted faithfully; None where it can, or where there is nothing to convert."""
    if isinstance(child, _READS_WEIGHTS):
        return f"{type(child).__name__} reads weights without calling the modules inside it"
    if not isinstance(child, torch.nn.Linear) or isinstance(child, Linear):
        return None
    if outer is not None:
        return f"inside a {type(outer).__name__}, which reads its weights without calling it"
    return (known.why or None) if known else None
