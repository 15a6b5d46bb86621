"""``deepspeed.zero.TiledLinear``: a linear layer whose weight is cut into modules by inputs and by outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError


class TiledLinear(nn.Module):
    """A linear layer as a grid of ``in_splits`` x ``out_splits`` layers of class ``linear_cls``.

    ``linears[o][i]`` maps part ``i`` of the inputs to part ``o`` of the outputs. Parts have equal sizes, or the first
    ones have one feature more; the bias belongs to the layers of the last inputs. Each layer is a module of its own,
    which the engine has in memory while it runs: see ``reduce_bucket_size`` and ``tiering.device_budget`` for the room.
    Further arguments go to ``linear_cls``. ``init_linear``, a linear layer, gives the first values.

    Called with a tensor of shape (..., in_features); with ``input_is_already_split`` with a sequence of its parts.
    Returns the outputs as one tensor of shape (..., out_features), or without ``combine_out_splits`` as a list of
    parts. A split by outputs computes each output as the whole layer does. A split by inputs adds up a product for each
    part, each rounded to the dtype of the outputs.

    A state dict has a name for each layer of the grid. To cut the layers of an existing model, with the names of the
    whole layers in checkpoints, use ``tiering.tile``. Raises ConfigError for splits that are not positive or more than
    there are features, and for an input of another size.
    """

    # The signature is DeepSpeed's.
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not isinstance(splits, int) or not 1 <= splits <= features:
                raise ConfigError(
                    f"TiledLinear: {name}_splits is {splits!r}; it must be a number from 1 to {name}_features,"
                    f" {features}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(inputs, outputs, bias=bias and number == in_splits - 1, **kwargs)
                for number, inputs in enumerate(_sizes(self.in_parts))
            )
            for outputs in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """The outputs; see the class."""
        inputs = self._parts(input_)
        outputs: list[Any] = []
        for row in self.linears:
            assert isinstance(row, nn.ModuleList)
            output = None
            for in_id, (linear, part) in enumerate(zip(row, inputs, strict=True)):
                output = self._reduce_local_output(in_id, len(outputs), output, linear(part))
            outputs.append(output)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    # Subclasses may replace the next two methods, which have DeepSpeed's names.

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """The sum of the outputs of part ``out_id`` so far, ``current_out`` (None at first), and ``new_out``."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        """One result of the parts."""
        return torch.cat(outputs, -1)

    def _parts(self, inputs: Any) -> Sequence[Tensor]:
        sizes = _sizes(self.in_parts)
        if isinstance(inputs, Tensor) and (self.in_splits == 1 or not self.input_is_already_split):
            if inputs.shape[-1:] != (self.in_features,):
                raise ConfigError(
                    f"TiledLinear has {self.in_features} inputs and was called with a tensor of shape"
                    f" {tuple(inputs.shape)}; its last dimension must be {self.in_features}"
                )
            parts: tuple[Tensor, ...] = inputs.split(sizes, -1)
            return parts
        if isinstance(inputs, Tensor) or [part.shape[-1] for part in inputs] != sizes:
            raise ConfigError(
                f"TiledLinear needs its input as {self.in_splits} parts with {', '.join(map(str, sizes))} features"
                " (input_is_already_split)"
            )
        return list(inputs)

    def copy_params_from(self, other: nn.Module) -> None:
        """Set the values to those of ``other``, a linear layer of the same size, on all ranks together.

        Raises ConfigError for another size.
        """
        weight, bias = other.weight, getattr(other, "bias", None)
        assert isinstance(weight, Tensor)
        if tuple(weight.shape) != (self.out_features, self.in_features) or (bias is None) == self.use_bias:
            raise ConfigError(
                f"TiledLinear has {self.in_features} inputs, {self.out_features} outputs and"
                f" {'a' if self.use_bias else 'no'} bias, and cannot take the values of a layer with a weight of shape"
                f" {tuple(weight.shape)} and {'no' if bias is None else 'a'} bias"
            )
        for number, row in enumerate(self.linears):
            rows = slice(*self.out_parts[number : number + 2])
            assert isinstance(row, nn.ModuleList)
            for place, linear in enumerate(row):
                columns = slice(*self.in_parts[place : place + 2])
                with torch.no_grad():
                    linear.get_parameter("weight").copy_(weight[rows, columns])
                    if bias is not None and place == self.in_splits - 1:
                        linear.get_parameter("bias").copy_(bias[rows])

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias},"
            f" in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` for a ``linear_cls`` that returns (output, bias), as Megatron's layers do; returns the same."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        product, bias = new_out
        # The layer of the last inputs has the bias.
        return (product if current_out is None else current_out[0] + product), bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        products, biases = zip(*outputs, strict=True)
        return torch.cat(products, -1), None if biases[0] is None else torch.cat(biases, -1)


def _bounds(features: int, splits: int) -> list[int]:
    """The first feature of each part, and the end of the last: the first parts have one feature more, if need be."""
    each, more = divmod(features, splits)
    return [part * each + min(part, more) for part in range(splits + 1)]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [end - first for first, end in itertools.pairwise(bounds)]
