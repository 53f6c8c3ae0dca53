"""What `convert` says about a model: what it did, what it left, and what of that may change bits."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import OptionError

_SHOWN = 6  # kinds that a warning names
_IN_PLACE = "convert changes the model in place and returns a report about it"


class LeftToTorch(UserWarning):
    """A converted model has modules of torch's in it, whose bits may depend on the batch."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` did. It is not the model, which is changed in place; see `module`.

    Attributes
    ----------
    module : torch.nn.Module
        The model itself.
    converted : tuple of str
        Names of the modules that are isogemm's now.
    left : dict of str to str
        Names of other modules with weights, with a part in a transformer, or without weights but with kernels that may
        give an element other bits in another place; and why they are as they were. What they compute is torch's.
    parts : dict of str to tuple of str
        Names of the converted modules by part; an attention module may be in two.
    quantized : dict of str to str
        Names of the modules whose weights are quantized now, and their formats.
    floats : dict of str to str
        Where weights were to be quantized: names of the Linear modules whose weights are as they were, and why.
    open : dict of str to str
        What is in `left` and may change bits: nothing asked for it, and it is not known to keep them.
    """

    module: Any
    converted: tuple[str, ...]
    left: dict[str, str]
    parts: dict[str, tuple[str, ...]]
    quantized: dict[str, str]
    floats: dict[str, str]
    open: dict[str, str]

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: this is the report, and the model is where it was.

        Raises
        ------
        OptionError
        """
        kind = type(self.module).__name__
        raise OptionError(
            "a call of convert's report", limit=f"a call of the {kind} itself", value="Conversion", said=_IN_PLACE,
            nearest="convert(model) on a line of its own, then model(...); or model = report.module",
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("__") and name not in self.__slots__ and hasattr(self.module, name):
            raise AttributeError(
                f"a Conversion has no {name!r}, the model has: {_IN_PLACE}. Write convert(model) on a line of its own, "
                f"then model.{name}; or model = report.module"
            )
        raise AttributeError(f"'Conversion' object has no attribute {name!r}")

    def __str__(self) -> str:
        counts = ", ".join(f"{len(names)} {part}" for part, names in self.parts.items() if names) or "nothing"
        lines = [f"converted {counts}; left {len(self.left)} modules", *_listed(self.left)]
        if self.quantized or self.floats:
            formats = Counter(self.quantized.values()).most_common()
            made = ", ".join(f"{n} linear to {fmt}" for fmt, n in formats) or "nothing"
            lines += [f"quantized {made}; {len(self.floats)} linear stay floats", *_listed(self.floats)]
        lines.append(
            "looked at: modules; what a forward method calls by itself (x @ w, softmax) stays torch's, and "
            "isogemm.torch.coverage(model, inputs) lists it"
        )
        return "\n".join(lines)


def _listed(reasons: dict[str, str]) -> list[str]:
    return [f"  {name or '(the model)'}: {why}" for name, why in reasons.items()]


def _kinds(module: Any, found: Mapping[str, str]) -> list[str]:
    """Modules by class and reason, the most frequent first."""
    counts = Counter((type(module.get_submodule(name)).__name__, why) for name, why in found.items())
    return [f"{n} {kind} ({why})" for (kind, why), n in counts.most_common()]


def warn_open(report: Conversion, model: str) -> None:
    """One warning for a model, which lists by kind what may change bits."""
    if not report.open:
        return
    kinds = _kinds(report.module, report.open)
    more = f"; and {len(kinds) - _SHOWN} more kinds" if len(kinds) > _SHOWN else ""
    warnings.warn(
        f"convert left {len(report.open)} modules of {model} to torch, whose bits may depend on the batch: "
        f"{'; '.join(kinds[:_SHOWN])}{more}. convert(model, strict=True) makes this an error; leave= and parts= "
        "say that it is meant.",
        LeftToTorch,
        stacklevel=3,
    )


def refuse_open(module: Any, found: Mapping[str, str]) -> None:
    """Raise an OptionError where modules may change bits, which the message lists by kind."""
    if not found:
        return
    raise OptionError(
        "convert(strict=True)",
        limit="models whose every module is converted or known to keep its bits",
        value=f"{len(found)} modules: " + "; ".join(_kinds(module, found)),
        nearest=f"leave={list(found)}, where their bits may change",
    )
