"""A frozen linear layer whose weight is stored in a block format, and decoded when it is used."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optim_cpu.formats import QuantizedFormat
from optim_cpu.quantization import Weight
from tiering._text import shorten
from tiering.errors import EngineStateError
from zero3.device.kernels.encoded_weight import DeviceWeight


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` with a frozen weight of shape (out_features, in_features) in ``form``.

    ``weight`` holds the codes, flat and in the dtype of ``form``, int8 or uint8, and ``weight_scales`` the bytes of the
    scales, so that neither a cast of the model nor the engine changes them. Code that takes the codes for the matrix,
    as a merge of adapters does, fails over their shape. ``bias`` is an ordinary parameter. Libraries that adapt
    ``nn.Linear``, such as peft, adapt this class. Backward computes the gradient of the input and of the bias only,
    from the codes: no decoded weight is saved.
    """

    form: QuantizedFormat
    weight: nn.Parameter
    weight_scales: nn.Parameter
    label = "a linear layer"
    """The layer in messages: with its name at the time when it was quantised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        form: QuantizedFormat,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
        _quantize_in_place(self, form, *_empty(form, out_features, in_features, device))
        if self.bias is not None:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Nothing: the codes are values that were stored, and no initializer computes them."""

    @property
    def encoded(self) -> Weight:
        """The weight, which decodes any part of itself. Borrows the parameters, which must be on their device."""
        return encoded_weight(self.form, self.out_features, self.weight, self.weight_scales)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy of the decoded weight, of shape (out_features, in_features), rounded to ``dtype``."""
        return self.encoded.decoded(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """``input W^T + bias`` in the dtype of the input, or under autocast in that of autocast.

        Raises TypeError for an input that is no float, ValueError for one of another width, and EngineStateError for a
        layer without values.
        """
        if not input.is_floating_point():
            # Some models cast the input to the dtype of a layer's weight.
            raise TypeError(
                f"{self.label} in {self.form.name} was called with {input.dtype}; if the model casts inputs to the"
                " dtype of the weight, which has codes here, leave this layer out of tiering.quantize(modules=...)"
            )
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{self.label} in {self.form.name} has {self.in_features} inputs and was called with a tensor of shape"
                f" {tuple(input.shape)}; its last dimension must be {self.in_features}"
            )
        if self.weight.is_meta and not input.is_meta:
            raise EngineStateError(
                f"{self.label} in {self.form.name} is on the meta device and has no values yet; pass weights= to"
                " tiering.initialize, and call the engine"
            )
        kind = input.device.type
        if not input.is_meta and torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, self.in_features)
        # mypy: torch does not type Function.apply.
        product: Tensor = Product.apply(  # type: ignore[no-untyped-call]
            rows, self.weight, self.weight_scales, self.form, self.out_features, False
        )
        # A view of a function's result can be changed in place, but a view that the function returns cannot.
        output = product.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        stored = state_dict.get(f"{prefix}weight")
        if isinstance(stored, Tensor) and stored.dtype is not self.weight.dtype:
            # A copy would convert values to codes one by one.
            error_msgs.append(
                f"{prefix}weight is {stored.dtype}, and not {self.weight.dtype} as the codes of {self.form.name}: load"
                " floats before tiering.quantize, or codes of the same format"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form.name}, block_size={self.form.group_size}"


class Product(torch.autograd.Function):
    """``x W^T`` of a matrix ``x``, or ``x W`` if W is ``transposed``.

    Saves the encoded weight only, which the engine fetches again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        form: QuantizedFormat,
        rows: int,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.form, ctx.rows, ctx.transposed = form, rows, transposed
        weight = encoded_weight(form, rows, codes, scales)
        return weight.transposed_product(x) if transposed else weight.product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        weight = encoded_weight(ctx.form, ctx.rows, *ctx.saved_tensors)
        product = weight.product(grad) if ctx.transposed else weight.transposed_product(grad)
        return product, None, None, None, None, None


def encoded_weight(form: QuantizedFormat, rows: int, codes: Tensor, scales: Tensor) -> Weight:
    matrix = codes.detach().view(rows, codes.numel() // max(rows, 1))
    return DeviceWeight(form, matrix, scales.detach())


def to_quantized(layer: nn.Linear, form: QuantizedFormat, name: str) -> None:
    """Turn ``layer`` into a ``QuantizedLinear`` in place, so that its hooks and references to it stay.

    ``name`` is the name of the layer in messages. On the meta device the layer gets parameters without values. Raises
    ValueError for a weight that ``form`` cannot store.
    """
    weight = layer.weight
    if weight.is_meta:
        encoded = _empty(form, layer.out_features, layer.in_features, weight.device)
    else:
        values = weight.detach()
        codes, scales = form.encode(values.float() if values.dtype is torch.float64 else values)
        encoded = codes.flatten().to(weight.device), scales.to(weight.device)
    _quantize_in_place(layer, form, *encoded)
    vars(layer)["label"] = f"linear layer {name!r}"


def _quantize_in_place(layer: nn.Linear, form: QuantizedFormat, codes: Tensor, scales: Tensor) -> None:
    layer.__class__ = QuantizedLinear
    assert isinstance(layer, QuantizedLinear)
    layer.form = form
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scales = nn.Parameter(scales, requires_grad=False)


def _empty(
    form: QuantizedFormat, rows: int, columns: int, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows * (columns // form.code_elements), dtype=form.dtype, device=device)
    return codes, torch.empty(form.scale_bytes(rows * columns), dtype=torch.uint8, device=device)


def explain_codes(error: BaseException, model: nn.Module) -> None:
    """Add a note to torch's error about shapes in a module that may use the codes of a quantised layer as a weight."""
    if not isinstance(error, RuntimeError) or not re.search(r"size|shape|dimension", str(error)):
        return
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = next((caller for caller in reversed(callers) if isinstance(caller, nn.Module)), None)
    if module is None or isinstance(module, QuantizedLinear):
        return
    # Below an adapter of peft the layer is ``base_layer``.
    bases = ((name, getattr(child, "base_layer", child)) for name, child in module.named_children())
    layers = tuple(name for name, base in bases if isinstance(base, QuantizedLinear))
    if layers:
        name = next((name for name, each in model.named_modules() if each is module), "")
        error.add_note(
            f"{name!r} has quantised layers ({shorten(layers)}), whose weights are flat codes. If the code of"
            f" {type(module).__name__} uses the weight of such a layer instead of calling the layer, leave it out of"
            " the quantised ones (modules)"
        )
