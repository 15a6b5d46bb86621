"""Frozen experts whose fused matrices are stored in a block format, and decoded when a token is routed to them.

A module of transformers keeps the matrices of its experts in parameters [experts, rows, columns]. Here such a parameter
holds the codes, [experts, bytes], and another one the scales. What the module's code reads under the name of the
parameter takes part in its products as the matrices would: it decodes those of the experts that are used, in the dtype
of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optim_cpu.formats import QuantizedFormat
from zero3.building.quantized_linear import Product, encoded_weight
from zero3.params.fused_experts import Experts, experts_in
from zero3.params.inner_tensors import InnerTensor

SCALES = "_scales"
"""What the name of a parameter with scales has behind that of the parameter with codes."""
# The scales of an expert are padded to so many bytes, so that a group can be divided before each of them.
_ALIGNMENT = 4


class QuantizedExperts(nn.Module):
    """Mixed into the class of a module whose fused matrices are encoded in ``form``: see ``to_quantized_experts``.

    ``matrices`` are the shapes [experts, rows, columns] by the names of the parameters, ``label`` is its name in
    messages.
    """

    form: QuantizedFormat
    matrices: dict[str, tuple[int, ...]]
    label: str

    def __getattr__(self, name: str) -> Any:
        shape = vars(self).get("matrices", {}).get(name)
        if shape is None:
            return super().__getattr__(name)
        codes, scales = self._parameters[name], self._parameters[name + SCALES]
        assert codes is not None and scales is not None
        return EncodedExperts(codes, scales, self.form, shape, vars(self).get("_input_dtype", torch.float32))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs: Tensor = args[0] if args else kwargs["hidden_states"]
        # Where torch multiplies with all experts, it asks for the dtype of the matrices before.
        vars(self)["_input_dtype"] = inputs.dtype
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare, (type(self).__bases__[1],), dict(vars(self))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}form={self.form.name}, block_size={self.form.group_size}"


_classes: dict[type, type[nn.Module]] = {}


def _quantized(kind: type) -> type[nn.Module]:
    """The class of modules of class ``kind`` with encoded matrices."""
    if kind not in _classes:
        _classes[kind] = type(f"Quantized{kind.__name__}", (QuantizedExperts, kind), {"__module__": __name__})
    return _classes[kind]


def _bare(kind: type) -> nn.Module:
    made = _quantized(kind)
    return made.__new__(made)


class EncodedExperts(Experts):
    """The matrices of all experts in ``form``: ``codes``, [experts, bytes], and ``scales``, [experts, bytes]."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        form: QuantizedFormat,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(shape, transposed=transposed)
        self.dtype, self.device = dtype, codes.device
        self._codes, self._scales, self._form = codes, scales, form

    def matrix(self, expert: int) -> EncodedMatrix:
        return self._matrix(expert, transposed=self.transposed)

    def values(self, expert: int) -> Tensor:
        return self._matrix(expert, transposed=False).decoded(self.dtype)

    def _matrix(self, expert: int, *, transposed: bool) -> EncodedMatrix:
        shape = self._shape[1:]
        return EncodedMatrix(
            self._codes[expert], self._scales[expert], self._form, shape, transposed=transposed
        )

    def whole(self) -> Tensor:
        whole = self.stacked(range(self._shape[0]))
        return whole.transpose(-2, -1) if self.transposed else whole

    def turned(self) -> EncodedExperts:
        return EncodedExperts(
            self._codes, self._scales, self._form, self._shape, self.dtype, transposed=not self.transposed
        )


class EncodedMatrix:
    """The matrix of one expert, of ``shape`` before it is ``transposed``, for products with inputs.

    Products have the dtype of the inputs, under autocast that of autocast. Any other operation gets the decoded matrix
    in float32.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        form: QuantizedFormat,
        shape: tuple[int, ...],
        *,
        transposed: bool,
    ) -> None:
        self._codes, self._scales, self._form = codes, scales, form
        self._rows, self._columns = shape
        self._transposed = transposed

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._columns, self._rows) if self._transposed else (self._rows, self._columns))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy of the values."""
        codes, scales = self._operands()
        values = encoded_weight(self._form, self._rows, codes, scales).decoded(dtype)
        return values.t() if self._transposed else values

    def __rmatmul__(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, with_rows=self._transposed)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if len(args) >= 2 and isinstance(args[1], EncodedMatrix) and isinstance(args[0], Tensor):
            inputs, matrix = args[:2]
            if name in ("matmul", "mm", "__matmul__") and len(args) == 2 and not kwargs:
                return matrix._product(inputs, with_rows=matrix._transposed)
            if name == "linear" and len(args) == 2 and kwargs.get("bias") is None:
                return matrix._product(inputs, with_rows=not matrix._transposed)
        return func(*map(_as_decoded, args), **{key: _as_decoded(each) for key, each in kwargs.items()})

    def _product(self, inputs: Tensor, *, with_rows: bool) -> Tensor:
        """``inputs`` times the stored matrix; ``with_rows``: times its transpose, products with its rows."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        codes, scales = self._operands()
        # mypy: torch does not type Function.apply.
        product: Tensor = Product.apply(  # type: ignore[no-untyped-call]
            inputs.reshape(-1, inputs.shape[-1]), codes, scales, self._form, self._rows, not with_rows
        )
        return product.view(*inputs.shape[:-1], product.shape[-1])

    def _operands(self) -> tuple[Tensor, Tensor]:
        """Codes and scales, both fetched: views, because the product bypasses the classes of its arguments.

        The fetch of one may take the room of the other if the room is full of other experts, but not twice.
        """
        nbytes = self._form.scale_bytes(self._rows * self._columns)
        self._scales.view(-1)
        codes = self._codes.view(-1)
        return codes, self._scales.view(-1)[:nbytes]


def _as_decoded(argument: Any) -> Any:
    return argument.decoded() if isinstance(argument, EncodedMatrix) else argument


def fused_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``module`` that hold the matrices of all its experts, by name; none for other modules."""
    count = experts_in(module)
    return {
        name: param
        for name, param in module._parameters.items()
        if param is not None and count and param.dim() == 3 and param.shape[0] == count
        if not isinstance(param, InnerTensor)
    }


def to_quantized_experts(module: nn.Module, form: QuantizedFormat, name: str) -> None:
    """Encode the ``fused_matrices`` of ``module`` in place, each expert for itself, with blocks in the last dimension.

    On the meta device the module gets parameters without values. Raises ValueError for a weight that ``form`` cannot
    store.
    """
    encoded = {each: _encoded(param, form) for each, param in fused_matrices(module).items()}
    vars(module)["matrices"] = {each: tuple(param.shape) for each, param in fused_matrices(module).items()}
    vars(module)["form"], vars(module)["label"] = form, f"module of experts {name!r}"
    for each, (codes, scales) in encoded.items():
        module._parameters[each] = nn.Parameter(codes, requires_grad=False)
        module.register_parameter(each + SCALES, nn.Parameter(scales, requires_grad=False))
    module.__class__ = _quantized(type(module))


def _encoded(param: nn.Parameter, form: QuantizedFormat) -> tuple[Tensor, Tensor]:
    experts, numel = param.shape[0], math.prod(param.shape[1:])
    codes = torch.empty((experts, numel // form.code_elements), dtype=form.dtype, device=param.device)
    padded = padded_scale_bytes(form, numel)
    scales = torch.zeros((experts, padded), dtype=torch.uint8, device=param.device)
    if not param.is_meta:
        for expert, matrix in enumerate(param.detach()):
            own_codes, own_scales = form.encode(matrix.float() if matrix.dtype is torch.float64 else matrix)
            codes[expert] = own_codes.flatten()
            scales[expert, : own_scales.numel()] = own_scales
    return codes, scales


def padded_scale_bytes(form: QuantizedFormat, numel: int) -> int:
    """Bytes of the scales of an expert of ``numel`` elements."""
    return -(-form.scale_bytes(numel) // _ALIGNMENT) * _ALIGNMENT
