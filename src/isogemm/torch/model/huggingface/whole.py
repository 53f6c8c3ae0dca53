"""Models of transformers that compute between their modules what no row is about: their own code stays, whole.

DeepSeek-V4 is one. Its layers keep a stack of residuals that a matrix of each token mixes; behind the keys of a window
its attention has entries that compress the keys before it, and writes a mask for these by itself. Linear modules,
norms, experts and activations in such a model are what they are in any other. Around them, while its own forward
method and those of its layers run, torch's functions are isogemm's (`own_code`).

Whether that is enough is seen in a small model of the same class, with a layer of each kind: every operator of a run
has to be known not to look at the batch, and every relation of `verify` has to hold. Padding before a token may be an
exception. Where a model takes it for tokens, a row has another result with it, not another rounding of it; then such
a mask is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ....errors import OptionError
from ... import functional, reductions
from ...operator import Tensor
from ...routing.rows import chained_softmax
from ...rows.gradients import softmax_back
from ..layers import Converted
from ..names import below
from ..own_code import RESULTS, OwnBlock, along, is_last, own, unsafe
from ..recognition import Match, mixed, random, touched
from ..verify import verify
from .recognition import models

_SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "sliding_window": 6,
    "num_local_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16, "index_topk": 2, "hc_sinkhorn_iters": 2,
}  # fmt: skip
_RATE = 4  # tokens of an entry that compresses keys
_LARGEST = 2**24  # parameters
_ABOUT = {"architectures", "dtype", "transformers_version", "_name_or_path"}  # what no bit depends on
_PADDING, _EAGER = "left-padding", "eager"


class attending(own):
    """`own` where attention is written out: products of stacks, softmax along any dimension, and means.

    A stack may be the values of keys, and a row the scores of a query. Terms are therefore added one at a time, in
    ascending order: a hidden key adds 0, wherever it stands.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Where such code chooses float32 by itself, and the contract is one of 16 bits, float32's default counts."""
        if self.contract is None or str(x.dtype).removeprefix("torch.") in self.contract.operands:
            return super().linear(x, weight, bias)
        return own(None, self.grad_order).linear(x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor | None:
        if min(a.dim(), b.dim()) < 2 or b.dim() == 2:
            return super().matmul(a, b)
        stack = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (x.expand(*stack, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
        y = functional.bmm(a, b, contract="fma/chain", grad_order=self.grad_order)
        return y.view(*stack, *y.shape[1:])

    def baddbmm(self, x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        options: dict[str, Any] = {"contract": "fma/chain", "grad_order": self.grad_order}
        return functional.baddbmm(x, batch1, batch2, beta=float(beta), alpha=float(alpha), **options)

    def softmax(self, x: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor | None:
        if type(dim) is not int or not x.dim() or dtype not in RESULTS:
            return None
        if not is_last(x, dim):
            return reductions.softmax(x.movedim(dim, -1), out_dtype=dtype).movedim(-1, dim)
        if x.dim() < 4 or not x.numel():
            return reductions.softmax(x, out_dtype=dtype)
        found: Tensor = _Chained.apply(x, dtype or x.dtype)
        return found

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
        return along(reductions.mean, x, dim, keepdim, dtype)


attending.ours = {
    **{func: getattr(attending, ours.__name__) for func, ours in own.ours.items()},
    **dict.fromkeys((torch.baddbmm, torch.Tensor.baddbmm), attending.baddbmm),
    **dict.fromkeys((torch.mean, torch.Tensor.mean), attending.mean),
}


class _Chained(torch.autograd.Function):  # type: ignore[misc]
    """`chained_softmax` along the last dimension, with the gradient of every softmax."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: Any) -> Tensor:
        ctx.dtype, y = x.dtype, chained_softmax(x).to(dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return softmax_back(ctx.saved_tensors[0].float(), dy.float()).to(ctx.dtype), None


class OwnLayer(OwnBlock):
    """`OwnBlock` of a layer, which checkpointing runs again in a backward pass."""

    scope = attending


class OwnModel(OwnBlock):
    """`OwnBlock` of the model around such layers."""

    scope = attending
    config: Any
    training: bool
    counts_padding: ClassVar[bool] = False  # it takes padding before a token for tokens
    seen: ClassVar[frozenset[type]] = frozenset()  # classes of the modules that were inside when it was looked at

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own.

        Raises OptionError: a mask with padding before a token, where the model would take it for tokens; dropout in
        attention, or another attention function than transformers' eager one.
        """
        if not torch.compiler.is_compiling():
            self._check(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
        return super().forward(*args, **kwargs)

    def _check(self, mask: Any) -> None:
        name, config = type(self).__name__, self.config
        hides = self.counts_padding and isinstance(mask, torch.Tensor) and mask.dim() == 2
        if hides and bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise OptionError(
                f"padding before a token in {name}", limit="padding behind the last token: this model takes it for "
                "tokens, and a row has another result with it than alone", value="a mask with zeros before ones",
                nearest="rows of one length, or each alone",
            )  # fmt: skip
        if self.training and (dropout := getattr(config, "attention_dropout", 0.0)):
            raise OptionError(
                f"dropout of attention in {name}", limit="none: its own code draws by the batch", value=dropout,
                nearest="model.config.attention_dropout = 0.0 before the model is made",
            )  # fmt: skip
        if config._attn_implementation != _EAGER:
            raise OptionError(
                f"attention of {name}", limit="the function in its own code", value=config._attn_implementation,
                nearest=f"model.set_attn_implementation({_EAGER!r})",
            )  # fmt: skip


def inside(module: Any, own: Mapping[str, Match]) -> set[str]:
    """Names of modules in models whose own code stays, or is to stay: what is no row by itself is known with these."""
    found = set()
    for name, model in module.named_modules():
        cls: Any = own[name].layer if name in own else type(model)
        if issubclass(cls, OwnModel):
            children = [(key, child) for key, child in model.named_modules() if key and not touched(child)]
            found |= {below(name, key) for key, child in children if type(child) in cls.seen}
    return found


def whole(module: Any, convert: Callable[..., Any]) -> tuple[dict[str, Match], str]:
    """What models, and the layers in them, become that compute attention by themselves, by their names; or why not."""
    found: dict[str, Match] = {}
    within = models(module)
    for name, model in within.items():
        layers = _layers(model)
        if not layers or isinstance(model, OwnModel) or model.config._attn_implementation != _EAGER:
            continue
        around = next(m for m in within.values() if any(child is model for child in m.modules()))
        why, counts, classes = _seen(around, type(model), convert)
        if why := next((w for w in map(touched, (model, *layers.values())) if w), why):
            return {}, f"{type(model).__name__} {why}"
        found[name] = Match("attention", mixed(OwnModel, type(model), counts_padding=counts, seen=classes))
        for key, layer in layers.items():
            found[below(name, key)] = Match("attention", mixed(OwnLayer, type(layer)))
    return found, ""


def _layers(model: Any) -> dict[str, Any]:
    """The modules in a model's lists, by their names; none where one of them is isogemm's, or a model holds models."""
    if len(models(model)) > 1:
        return {}
    lists = {key: child for key, child in model._modules.items() if isinstance(child, torch.nn.ModuleList)}
    found = {f"{key}.{i}": layer for key, child in lists.items() for i, layer in enumerate(child)}
    return {} if any(isinstance(layer, Converted) for layer in found.values()) else found


_Seen = tuple[str, bool, frozenset[type]]
_LOOKS: dict[Any, _Seen] = {}


def _seen(around: Any, cls: Any, convert: Callable[..., Any]) -> _Seen:
    """Why a model's own code is not enough, empty where it is; whether it takes padding for tokens; what is in it."""
    try:
        config = _smaller(around.config)
        sizes = {key: x for key, x in config.to_dict().items() if key not in _ABOUT}
        key = type(around), cls, json.dumps(sizes, sort_keys=True, default=str)
        if key not in _LOOKS:
            with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
                _LOOKS[key] = _look(_small(type(around), config), cls, convert)
        return _LOOKS[key]
    except Exception as error:  # whatever another library's code raises
        told = error.value if isinstance(error, OptionError) else type(error).__name__
        return f"cannot be looked into ({told})", False, frozenset()


def _look(small: Any, cls: Any, convert: Callable[..., Any]) -> _Seen:
    model = next(m for m in small.modules() if type(m) is cls)
    classes = frozenset(type(child) for child in model.modules())
    for layer in _layers(model).values():
        layer.__class__ = mixed(OwnLayer, type(layer))
    model.__class__ = mixed(OwnModel, cls, seen=classes)
    convert(small, strict=True)
    ids = torch.randint(_SMALL["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0), device="cpu")
    for training in (True, False):
        if why := unsafe(small.train(training), ids):
            return why, False, classes
    broken = verify(small, ids).broken
    counts = _PADDING in broken and _counts_padding(small, ids)
    others = [f"has other bits in {name}: {x}" for name, x in broken.items() if name != _PADDING or not counts]
    return others[0] if others else "", counts, classes


def _counts_padding(model: Any, ids: Any) -> bool:
    """Whether padding before a prompt gives another result, and not another rounding of it."""
    rows, mask = (torch.nn.functional.pad(x, (3, 0)) for x in (ids, torch.ones_like(ids)))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids, use_cache=False)[0]
        padded = model(rows, attention_mask=mask, position_ids=positions, use_cache=False)[0][:, 3:]
    return bool((padded - alone).abs().max() > 1e-3 * alone.abs().max())


def _smaller(config: Any) -> Any:
    """A configuration with small sizes, and one layer of each kind."""
    config, count = copy.deepcopy(config), config.num_hidden_layers
    lists = {key: x for key, x in vars(config).items() if isinstance(x, list) and len(x) == count}
    kinds = [str([x[i] for x in lists.values()]) for i in range(count)]
    chosen = sorted({kinds.index(kind) for kind in kinds})
    changes: dict[str, Any] = {key: [x[i] for i in chosen] for key, x in lists.items()}
    changes |= {key: x for key, x in _SMALL.items() if getattr(config, key, None)}
    changes |= {"num_hidden_layers": len(chosen), "attention_dropout": 0.0}
    if rates := getattr(config, "compress_rates", None):
        changes["compress_rates"] = dict.fromkeys(rates, _RATE)
    for key, x in changes.items():
        setattr(config, key, x)
    return config


def _small(cls: Any, config: Any) -> Any:
    """A model of a class, with numbers of our own in its weights."""
    with torch.device("meta"):
        if sum(p.numel() for p in cls(copy.deepcopy(config)).parameters()) > _LARGEST:
            raise ValueError(cls)
    with torch.device("cpu"):
        small = cls._from_config(config, dtype=torch.float32, attn_implementation=_EAGER)
    for i, p in enumerate(small.parameters()):
        p.requires_grad_(False)
        p.copy_(random(*p.shape, seed=i) * 0.1 + (p.dim() < 2) * p)
    for child in small.modules():
        if isinstance(child, torch.nn.Dropout):  # it stays torch's everywhere
            child.p = 0.0
    for x in small.buffers():
        if x.dtype == torch.int64 and x.dim() == 2:  # experts of each token's id
            x.copy_(torch.arange(x.numel(), device=x.device).view(x.shape) % _SMALL["num_local_experts"])
    return small.eval()
