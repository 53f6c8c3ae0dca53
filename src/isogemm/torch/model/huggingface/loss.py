"""The loss of transformers' causal language models by `reductions.cross_entropy`: no copy of the logits in float32."""

from __future__ import annotations

from typing import Any

import torch

from ....errors import ShapeError
from ... import reductions
from ...operator import Tensor
from .recognition import models

_OWN = "_loss_function"  # where a model of transformers keeps one that it was given


def heads(module: Any) -> dict[str, Any]:
    """The models in `module`, by name, whose loss is transformers' own for next tokens."""
    some = {name: child for name, child in models(module).items() if _of_next_tokens(child)}
    if not some:
        return {}
    from transformers.loss.loss_utils import ForCausalLMLoss

    return {name: child for name, child in some.items() if getattr(child, _OWN, ForCausalLMLoss) is ForCausalLMLoss}


def _of_next_tokens(model: Any) -> bool:
    """Whether a model's loss is that, by the type that transformers reads from the name of its class.

    Of older names, such as GPT2LMHeadModel, it has no type, and takes this loss, with a warning; nor has it one of
    models without a head.
    """
    named = any(kind.__name__.endswith("LMHeadModel") for kind in type(model).__mro__)
    return getattr(model, "loss_type", None) == "ForCausalLM" or (named and getattr(model, "loss_type", None) is None)


def give_back(module: Any) -> None:
    """Let a model have transformers' loss again."""
    if vars(module).get(_OWN) is causal_lm_loss:
        del vars(module)[_OWN]


def causal_lm_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """The sum of -log p(next token) over all tokens, as one row, divided by their number or `num_items_in_batch`.

    transformers' ForCausalLMLoss: the same arguments, and the same value but for roundings.

    Parameters
    ----------
    logits : Tensor, shape (..., vocab_size)
        Of every token, or of those that `shift_labels` are of.
    labels : Tensor of integers, shape (...)
        The tokens themselves, not those that follow, unless `shift_labels` has these.
    vocab_size : int
    num_items_in_batch : int or Tensor, optional
        Tokens of a whole step.
    ignore_index : int
        A label that has no loss.
    shift_labels : Tensor of integers, optional

    Returns
    -------
    Tensor, shape ()
        float32.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if logits.shape[-1] != vocab_size:
        value = logits.shape[-1]
        raise ShapeError("last dimension of logits", limit="vocab_size", value=value, nearest=vocab_size)
    targets = shift_labels.reshape(-1).to(logits.device)
    losses = reductions.cross_entropy(
        logits.reshape(-1, vocab_size), targets, ignore_index=ignore_index, out_dtype=torch.float32
    )
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return reductions.sum(losses) / torch.as_tensor(count, device=logits.device)
