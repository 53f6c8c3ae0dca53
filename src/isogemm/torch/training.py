"""transformers' Trainer with the gradients of isogemm: accumulation that does not depend on how a batch is cut.

The Trainer clips what stands in ``.grad`` right behind the last backward pass of a step, and has no event between the
two. So the callback collects the float32 buffers in the event behind clipping, and clips by the Trainer's own argument.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OptionError
from .gemm.main_grad import collect_main_grad, use_main_grad
from .model.layers import Converted
from .operator import Tensor

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        'isogemm.torch.TrainerCallback needs transformers: pip install "isogemm[hf]"', name="transformers"
    ) from error


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Gradients of `transformers.Trainer` with the bits of the whole step, however it is accumulated.

    ``Trainer(model, args, callbacks=[isogemm.torch.TrainerCallback()])``, after ``convert(model, grad_order=...)``. For
    the run every trained parameter has a float32 buffer (`use_main_grad`); before each step of the optimizer the sums
    are rounded into ``.grad`` and clipped to ``args.max_grad_norm``; afterwards the buffers are gone again.

    Parameters
    ----------
    check : bool
        In the first step with a learning rate above 0, see that the optimizer has moved parameters: one that holds
        others, or copies of its own, would train nothing and say nothing.

    Attributes
    ----------
    grad_norm : float or None
        Before clipping, of the last step. What the Trainer logs under that name is this number.

    Raises
    ------
    OptionError
        As training begins: a trained parameter that no layer of isogemm's has, float16 with a scaled loss, several
        devices or processes. In a step: a gradient that did not go through a buffer; parameters that did not move.

    Determinism
    -----------
    As `use_main_grad`: micro-batches of whole leaves of ``grad_order``, in the same order of rows, leave the same bits
    in every parameter. The loss has to be a sum over tokens with one scale for the step, as the Trainer's own is for
    models of transformers that take ``num_items_in_batch``.
    """

    def __init__(self, check: bool = True) -> None:
        self.check = check
        self.grad_norm: float | None = None
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, place of an element, its value

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Give the parameters their buffers."""
        _check_arguments(args)
        use_main_grad(model)
        without = [n for n, p in model.named_parameters() if p.requires_grad and getattr(p, "main_grad", None) is None]
        if without:
            _release(model)
            raise OptionError(
                "trained parameters", limit="parameters of isogemm's layers", value=", ".join(without),
                nearest="convert(model) of these modules too, or requires_grad_(False)",
            )  # fmt: skip

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Collect, clip, and remember an element of each parameter that has to move."""
        passed = [name for name, p in model.named_parameters() if p.grad is not None]
        if passed:
            raise OptionError(
                "gradients of a step", limit="float32 buffers", value=f".grad of {', '.join(passed)}",
                nearest="the weights' use by isogemm's layers alone, or requires_grad_(False)",
            )  # fmt: skip
        collect_main_grad(model)
        trained = [p for p in model.parameters() if p.grad is not None]
        limit = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else float("inf")
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(trained, limit))
        optimizer = others.get("optimizer")
        if self.check and optimizer is not None and any(group["lr"] > 0 for group in optimizer.param_groups):
            self._before = [_largest(p) for p in trained]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See that something moved, once."""
        before, self._before = self._before, []
        if not before or not self.grad_norm:  # a gradient of zeros, or none that is a number
            return
        self.check = False
        if not any(bool(p.detach().flatten()[i] != value) for p, i, value in before):
            raise OptionError(
                "step of the optimizer", limit="parameters that move by their gradients",
                value=f"{len(before)} parameters as they were, with gradients of norm {self.grad_norm:.3g}",
                nearest="an optimizer of model.parameters(); float32 parameters where the learning rate is below their "
                "precision; TrainerCallback(check=False)",
            )  # fmt: skip

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """The norm, which the Trainer took of gradients that were not there yet."""
        for record in (logs, *state.log_history[-1:]):
            if record and "grad_norm" in record and self.grad_norm is not None:
                record["grad_norm"] = self.grad_norm

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Take the buffers away."""
        _release(model)


def _check_arguments(args: Any) -> None:
    if args.fp16:
        raise OptionError("mixed precision", limit="a loss that is not scaled", value="fp16", nearest="bf16=True")
    for name in ("n_gpu", "world_size"):
        if getattr(args, name) > 1:
            raise OptionError(
                name, limit="1: the Trainer's sum over devices is not isogemm's", value=getattr(args, name),
                nearest="isogemm.torch.distributed.GradientTree, with a loop of your own",
            )  # fmt: skip


def _largest(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The element with the largest gradient, which moves if any does."""
    i = p.grad.abs().argmax()
    return p, i, p.detach().flatten()[i].clone()


def _release(model: Any) -> None:
    for p in model.parameters():
        if hasattr(p, "main_grad"):
            del p.main_grad
    for layer in model.modules():
        if isinstance(layer, Converted):
            layer.main_grads = None
