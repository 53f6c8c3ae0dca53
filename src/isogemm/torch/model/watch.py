"""Whether a converted model is still what `convert` left: looked at before each of its calls.

Other code puts modules of its own into a model: adapters around a projection, a longer embedding table. Those are
torch's and compute as torch does, and nothing would say so. The model's root keeps which children every module had, and
which attention function was set. A call of another model is an error until `convert` has seen it again. A module around
converted ones, without weights of its own inside (a checkpoint's, a compiled one), changes nothing and is let through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import OptionError
from ...operands.tensors import run_as_it_is
from .huggingface.modules import NAME, refuse_weights
from .layers import Converted

_NAME = "isogemm_watch"  # in the root's own attributes, so that copies and pickles have one of their own
_SHOWN = 4  # modules that an error names


def watch(root: Any, before: Sequence[tuple[Any, str]] = ()) -> None:
    """Keep what a model is now; `before` has the modules with a configuration, and the attention function of each."""
    had = {id(module): (module, name) for module, name in (*before, *forget(root)) if name != NAME}
    if root._modules:
        known = vars(root)[_NAME] = Watch(root, list(had.values()))
        root.register_forward_pre_hook(_look)
        for model in known.attending:
            model.register_forward_pre_hook(_asked, with_kwargs=True)


def forget(root: Any) -> list[tuple[Any, str]]:
    """Watch a model and its parts no more; the attention functions that its modules had before `convert`."""
    had: list[tuple[Any, str]] = []
    for child in root.modules():  # a part that was converted alone is looked at with the whole
        known = vars(child).pop(_NAME, None)
        had += known.had if known is not None else ()
        for key, hook in list(child._forward_pre_hooks.items()):
            if hook in (_look, _asked):
                del child._forward_pre_hooks[key]
                child._forward_pre_hooks_with_kwargs.pop(key, None)
    return had


class Watch:
    """What a model was when `convert` left it: it holds the modules, whose identity nothing else then takes."""

    def __init__(self, root: Any, had: list[tuple[Any, str]]) -> None:
        self.root, self.had = root, had
        self._keep()

    def _keep(self) -> None:
        modules = list(self.root.modules())
        self.families = [(module, dict(module._modules)) for module in modules if module._modules]
        # The outermost of those that share a configuration.
        named = {id(vars(module)["config"]): module for module in reversed(modules) if "config" in vars(module)}
        self.attending = [module for module in named.values() if self._attention(module) == NAME]

    def _attention(self, module: Any) -> Any:
        name = getattr(module.config, "_attn_implementation", None)
        return name.removeprefix("paged|") if isinstance(name, str) else name  # while requests are batched

    def check(self) -> None:
        """Raise unless the model is as it was, or has only more around what is converted."""
        for module, children in self.families:
            if module._modules != children:  # modules are equal where they are the same
                break
        else:
            for module in self.attending:
                if self._attention(module) != NAME:
                    _refuse([f"the attention function is {self._attention(module)!r}"])
            return
        _refuse(self._strangers())
        self._keep()

    def _strangers(self) -> list[str]:
        """What is new in the model and is not isogemm's: with weights, in a converted module, or in one's place."""
        before = {id(child) for _, children in self.families for child in children.values()} | {id(self.root)}
        found, lost = [], set()
        for module, children in self.families:
            now = list(module._modules.values())
            gone = [x for x in children.values() if x not in now]
            if isinstance(module, Converted) or any(isinstance(x, Converted) for x in gone):
                lost |= {id(x) for x in now if x is not None and not x._modules}
        for name, module in self.root.named_modules():
            if id(module) in before or isinstance(module, Converted):
                continue
            if id(module) in lost or any(p is not None for p in module._parameters.values()):
                found.append(f"{name} is a {type(module).__name__}")
        return found


def _refuse(found: Sequence[str]) -> None:
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise OptionError(
        "a converted model that was changed", limit="the modules and the attention function that convert left",
        value="; ".join(found[:_SHOWN]) + more,
        nearest="isogemm.torch.convert(model) again, with leave= or parts= for what is to be torch's",
    )  # fmt: skip


def _look(module: Any, inputs: Any) -> None:
    """Run by torch before the root's forward method."""
    known = vars(module).get(_NAME)
    if known is None:
        return
    if torch.compiler.is_compiling():
        torch._dynamo.comptime.comptime(_compiled)  # compiled again where modules were changed; here without a guard
    else:
        known.check()


def _asked(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run before a model's forward method, for some hand on to attention only a part of what they are asked for."""
    refuse_weights(kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)))


for _hook in (_look, _asked):
    run_as_it_is(_hook.__code__)  # else torch compiles it on its own, and code that was compiled asks no more


def _compiled(context: Any) -> None:
    """`Watch.check` while `_look` is compiled, of the module that it has."""
    module = context.get_local("module")._i_will_not_complain_if_bc_breaks_VariableTracker().value
    vars(module)[_NAME].check()
