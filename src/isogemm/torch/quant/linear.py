"""Quantized weights in torch: `linear` on a `isogemm.QuantizedMatrix`, and a layer that holds one."""

from __future__ import annotations

from typing import Any

import torch

from ...api import products as api
from ...api.quantized import ACTIVATIONS
from ...base import arguments as given
from ...contract.spec import Contract, ContractLike, as_contract
from ...errors import DeviceError, DTypeError, FormatError, ShapeError
from ...quant.matrix import QuantizedMatrix
from .. import ops
from ..gemm import backward
from ..model.layers import Converted
from ..ops import Tensor
from ..rows.checks import dtype_of
from . import ops as quantized_ops

__all__ = ["QuantizedLinear", "linear"]


def linear(
    x: Tensor,
    w: QuantizedMatrix,
    bias: Tensor | None = None,
    *,
    contract: ContractLike | None = None,
    activations: str | None = None,
    grad_order: str = "leaf4096",
    out_dtype: Any = None,
) -> Tensor:
    """x @ w.T + bias for x [..., k] and a quantized w [n, k]; what `isogemm.torch.linear` does with such a weight.

    Gradients go to x and bias, not to w: dx = dy @ ``w.dequantize()``, a chain over the columns of y. The weights are
    float32 there where they were in the forward product (and for integer products, whose rounding of x has no
    derivative and is passed over), else of the type of x.
    """
    _check_tensor("x", x)
    if bias is not None:
        _check_tensor("bias", bias)
    given.of_type("grad_order", grad_order, str, "chain, leafL or treeN", "leaf4096")
    options = "" if activations is None else _checked(activations), grad_order, _dtype(out_dtype)
    return call(_autocast(x), w, bias, _text(contract), *options)


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"{name} of linear", limit="a tensor", value=type(x).__name__, nearest="torch.as_tensor")


def _checked(activations: Any) -> str:
    return given.one_of("activations", activations, ACTIVATIONS, "'q8'")


def _dtype(out_dtype: Any) -> Any:
    """torch's name of a type, which is what an operator takes."""
    return None if out_dtype is None else dtype_of(None, out_dtype)


def call(
    x: Tensor, w: QuantizedMatrix, bias: Tensor | None, contract: str, activations: str, grad_order: str, out_dtype: Any
) -> Tensor:
    """The product by the shortest way that the call allows."""
    compiling = torch.compiler.is_compiling()
    records = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if not compiling and not records and ops.is_plain(x, bias):
        return quantized_ops.linear(x, w, bias, contract, activations, out_dtype)
    about = (w.format.name, *w.shape)
    return _operator(x, quantized_ops.blocks_of(w), bias, about, contract, activations, grad_order, out_dtype)


def _operator(
    x: Tensor, blocks: Tensor, bias: Tensor | None, about: tuple[str, int, int], contract: str,
    activations: str, grad_order: str, out_dtype: Any,
) -> Tensor:  # fmt: skip
    inputs = (x, blocks, bias, *about, contract, activations, grad_order, out_dtype)
    if not torch.compiler.is_compiling():
        backward._refuse_tangents((x, bias))
        if torch.is_grad_enabled() and ops.differentiates():
            return quantized_ops.Recorded.apply(*inputs)
    if ops.forward_alone():
        return quantized_ops.linear_forward_op(x, blocks, bias, *about, contract, activations, out_dtype)
    return quantized_ops.linear_op(*inputs)


def _autocast(x: Tensor) -> Tensor:
    """x as autocast wants it for a product."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x
    half = (torch.float32, torch.bfloat16, torch.float16)
    return x.to(torch.get_autocast_dtype(kind)) if x.dtype in half else x


def _text(contract: ContractLike | None) -> str:
    return contract if isinstance(contract, str) else "" if contract is None else str(contract)


class QuantizedLinear(Converted, torch.nn.Module):  # type: ignore[misc]
    """x @ weight.T + bias with a quantized weight, which is no parameter: gradients go to x and to the bias.

    Parameters
    ----------
    weight : QuantizedMatrix
        [n, k], over bytes that stay where they are: a file that `isogemm.quant.load` mapped is not read before it is
        used. Memory that is read-only otherwise (bytes, ``np.memmap`` of mode "r") is copied.
    bias : tensor [n], optional
        A parameter stays the one it is; another tensor becomes one that takes no gradient unless it did.
    activations, contract, out_dtype
        As in `isogemm.linear`.

    Raises
    ------
    DTypeError, ShapeError, LayoutError, OptionError, ContractError

    Attributes
    ----------
    weight : QuantizedMatrix
    format : str

    Notes
    -----
    ``state_dict`` holds ``weight``, the bytes of the rows as uint8 [n, row bytes] on the CPU; ``format``, its name as
    uint8; and ``bias``. `load_state_dict` takes them for a layer of that shape and format. `to` moves the weight to a
    CUDA device and back; the bytes stay on the host as well. A change of dtype changes the bias alone.

    ``state_dict()["weight"]`` has the layer's memory, as a parameter has: what is written into it the next call
    computes with, and a file that is mapped stays as it is. It is a copy where rows lie apart, and the host's bytes,
    not the device's, where the layer is on a CUDA device; there `load_state_dict` reaches both.

    Determinism
    -----------
    As `isogemm.linear`.
    """

    part = "linear"
    grad_order = "leaf4096"
    blocks: Tensor

    def __init__(
        self,
        weight: QuantizedMatrix,
        bias: Tensor | None = None,
        *,
        activations: str | None = None,
        contract: ContractLike | None = None,
        out_dtype: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(weight, QuantizedMatrix):
            raise DTypeError(
                "weight of QuantizedLinear", limit="a QuantizedMatrix", value=type(weight).__name__,
                nearest="isogemm.quantize(weight, 'Q4_K')",
            )  # fmt: skip
        asked = "" if activations is None else _checked(activations)
        self.out_features, self.in_features = weight.shape
        self.format = weight.format.name
        self.activations, self.out_dtype = activations, _dtype(out_dtype)
        self.contract: Contract | None = None if contract is None else as_contract(contract)
        self._call = ("" if contract is None else str(self.contract), asked, self.grad_order, self.out_dtype)
        self.register_parameter("bias", _parameter(bias, weight.shape[0]))
        self.register_buffer("blocks", None, persistent=False)
        self._hold(weight)

    @property
    def weight(self) -> QuantizedMatrix:
        """The weight, where the layer is."""
        return self._matrix

    def _hold(self, weight: QuantizedMatrix) -> None:
        self._matrix = weight
        self.blocks = quantized_ops.blocks_of(weight)

    def forward(self, input: Any) -> Any:
        """input @ weight.T + bias."""
        x, bias = input, self.bias
        if torch.compiler.is_compiling():
            about = (self.format, self.out_features, self.in_features)
            return _operator(_autocast(x), self.blocks, bias, about, *self._call)
        _check_tensor("x", x)
        if self._buffers["blocks"] is not self._matrix._tensor:  # torch.func.functional_call, or an assignment
            about = (self.format, self.out_features, self.in_features)
            return _operator(_autocast(x), self.blocks, bias, about, *self._call)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or not ops.is_plain(x, bias):
            return call(_autocast(x), self._matrix, bias, *self._call)
        return api.linear(
            x, self._matrix, bias, contract=self.contract, activations=self.activations, out_dtype=self.out_dtype
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves: torch's functions see where to, and not the weight, whose kernels' copies differ by device."""
        blocks = self.blocks
        there = fn(torch.empty(0, dtype=torch.uint8, device=blocks.device)).device
        matrix = self._matrix
        if there != blocks.device:  # first, so that what fails changes nothing
            if there.type not in ("cpu", "cuda"):
                raise DeviceError(
                    "device of QuantizedLinear", limit="cpu or cuda", value=str(there), nearest=".to('cpu')"
                )
            matrix = matrix.to(there)
        self.blocks = None
        try:
            super()._apply(fn, recurse)
        finally:
            self.blocks = blocks
        if matrix is not self._matrix:
            self._hold(matrix)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = quantized_ops.blocks_of(self._matrix.to("cpu")).detach().contiguous()
        destination[f"{prefix}format"] = torch.tensor(list(self.format.encode()), dtype=torch.uint8)

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        own = (f"{prefix}weight", f"{prefix}format")
        found = [state.get(key) for key in own]
        rest = {key: value for key, value in state.items() if key not in own}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        if strict:
            missing += [key for key, value in zip(own, found, strict=True) if value is None]
        weight, name = found
        if weight is None:
            return
        try:
            for what, value in (("weight", weight), ("format", name)):
                if value is not None and (not isinstance(value, torch.Tensor) or value.is_meta):
                    shown = "a meta tensor" if isinstance(value, torch.Tensor) else type(value).__name__
                    raise DTypeError(f"{prefix}{what}", limit="a tensor with data", value=shown, nearest="torch.uint8")
            self._load(prefix, weight, self.format if name is None else _text_of(f"{prefix}format", name))
        except (DTypeError, FormatError, ShapeError) as error:
            errors.append(str(error))

    def _load(self, prefix: str, weight: Tensor, fmt: str) -> None:
        if fmt != self.format:
            raise FormatError(f"{prefix}format", limit=self.format, value=fmt, nearest="a layer of that format")
        want = [self.out_features, self._matrix.format.row_bytes(self.in_features)]
        if list(weight.shape) != want or weight.dtype != torch.uint8:
            raise ShapeError(
                f"{prefix}weight", limit=f"uint8 {want}", value=f"{weight.dtype} {list(weight.shape)}",
                nearest="the state_dict of such a layer",
            )  # fmt: skip
        rows = weight.detach().to("cpu", copy=True).contiguous().numpy()
        name = self._matrix.name
        made = QuantizedMatrix.from_bytes(rows, shape=self._matrix.shape, format=fmt, name=name)
        self._hold(made.to(self.blocks.device))

    def __getstate__(self) -> dict[str, Any]:
        """Without the weight's tensor, which is made of the matrix again; for pickle and for copies."""
        state = dict(super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__)
        state["_buffers"] = {**state["_buffers"], "blocks": None}
        state["_matrix"], state["_was_on"] = self._matrix.to("cpu"), str(self.blocks.device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """On the device of the bias, which torch.load may have moved; without one where the layer was, if possible."""
        was_on = state.pop("_was_on")
        super().__setstate__(state)
        if self.bias is not None:
            was_on = str(self.bias.device)
        self._hold(self._matrix.to(was_on if torch.cuda.is_available() else "cpu"))

    def extra_repr(self) -> str:
        """Sizes, format, and what activations become."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}, activations={self.activations or 'default'}, contract={self.contract or 'default'}"
        )


def _text_of(what: str, name: Tensor) -> str:
    if name.dtype != torch.uint8 or name.dim() != 1:
        value = f"{name.dtype} {list(name.shape)}"
        raise DTypeError(what, limit="a format's name as uint8", value=value, nearest="torch.uint8")
    return bytes(name.tolist()).decode("ascii", "replace")


def _parameter(bias: Any, n: int) -> Any:
    if bias is None or isinstance(bias, torch.nn.Parameter):
        made = bias
    elif isinstance(bias, torch.Tensor) and not bias.is_nested:
        made = torch.nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    else:
        raise DTypeError(
            "bias of QuantizedLinear", limit="a tensor", value=type(bias).__name__, nearest="torch.as_tensor"
        )
    if made is not None and tuple(made.shape) != (n,):
        raise ShapeError("shape of bias", limit=[n], value=list(made.shape), nearest=[n])
    return made
