"""A layer of a model with a quantized weight."""

from __future__ import annotations

from typing import Any

import torch

from ...api import products as api
from ...contract.spec import Contract, ContractLike, as_contract
from ...errors import DeviceError, DTypeError, FormatError, ShapeError
from ...quant.matrix import QuantizedMatrix
from ..arguments import autocast, check_tensor, is_uncast, options
from ..model.layers import Converted
from ..operator import Tensor, is_plain
from .ops import blocks_of, call, call_blocks, checked


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
        asked = checked(activations)
        self.out_features, self.in_features = weight.shape
        self.format = weight.format.name
        self.contract: Contract | None = None if contract is None else as_contract(contract)
        text, _, self.out_dtype = options(self.contract, self.grad_order, out_dtype)
        self.activations, self._call = activations, (text, asked, self.grad_order, self.out_dtype)
        self.register_parameter("bias", _parameter(bias, weight.shape[0]))
        self.register_buffer("blocks", None, persistent=False)
        self._hold(weight)

    @property
    def weight(self) -> QuantizedMatrix:
        """The weight, where the layer is."""
        return self._matrix

    def _hold(self, weight: QuantizedMatrix) -> None:
        self._matrix = weight
        self.blocks = blocks_of(weight)

    def forward(self, input: Any) -> Any:
        """input @ weight.T + bias."""
        x, bias = input, self.bias
        compiling = torch.compiler.is_compiling()
        if not compiling:
            check_tensor("x of linear", x)
        # Other blocks than the matrix's: torch.func.functional_call, or an assignment.
        if compiling or self._buffers["blocks"] is not self._matrix._tensor:
            about = (self.format, self.out_features, self.in_features)
            return call_blocks(*autocast(x), self.blocks, bias, *about, *self._call)
        if torch.is_grad_enabled() or not is_uncast(x) or not is_plain(x, bias):
            return call(*autocast(x), self._matrix, bias, *self._call)
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
        destination[f"{prefix}weight"] = blocks_of(self._matrix.to("cpu")).detach().contiguous()
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
        state = dict(super().__getstate__())
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
