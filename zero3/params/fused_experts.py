"""Parameters that hold the matrices of several experts, of which a pass fetches those that it uses.

Transformers keeps the experts of a block in parameters of shape [experts, ...], and computes with one expert after the
other: it reads ``weight[expert]``, or passes the whole parameter to ``grouped_mm``, which multiplies the rows of each
expert with its matrix. If such a parameter is frozen and moves, each of its experts is a slice: a hidden parameter in a
group of its own (zero3/setup/groups.py), with the expert's bytes at the home of the whole parameter. A read of an
expert gives its slice, which is fetched when an operation needs its values, like any resharded parameter.

Note [Experts one after the other have the same bits]
    On a CPU ``grouped_mm`` is a loop of ``mm``, and so is ``grouped_mm`` here. Everything else that transformers
    computes is the same code, with or without slices: so placement changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# Implementations of transformers that use one expert at a time; None is "eager".
ONE_BY_ONE = (None, "eager", "batched_mm", "grouped_mm")
# torch's function, and that of transformers for versions of torch without it.
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")

_slices: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # fused parameter -> its slices


def experts_in(module: nn.Module) -> int:
    """The number of experts that parameters of ``module`` hold, 0 if it is no such module of transformers.

    Also 0 for an implementation that uses all experts at once.
    """
    count, known = getattr(module, "num_experts", None), {"is_transposed", "has_gate"} <= vars(module).keys()
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return count if known and isinstance(count, int) and implementation in ONE_BY_ONE else 0


def slice_up(param: nn.Parameter, slices: Sequence[nn.Parameter]) -> None:
    """Let reads of an expert of ``param`` give one of ``slices``."""
    _slices[param] = slices


def join_up(params: Iterable[nn.Parameter]) -> None:
    """Undo ``slice_up``."""
    for param in params:
        _slices.pop(param, None)


def read_experts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` if it uses single experts of a resharded parameter, else NotImplemented."""
    for argument in args[:2]:
        if isinstance(argument, nn.Parameter) and (slices := _slices.get(argument)) is not None:
            return _Matrices(argument, slices).call(func, args, kwargs)
    return NotImplemented


class _Matrices:
    """The matrices of all experts, perhaps ``transposed``, in place of a tensor [experts, rows, columns].

    Single experts are read from ``slices``. Everything else is done with the whole parameter.
    """

    def __init__(
        self, param: nn.Parameter, slices: Sequence[nn.Parameter], *, transposed: bool = False
    ) -> None:
        self._param = param
        self._slices = slices
        self._transposed = transposed

    def __getitem__(self, index: Any) -> Any:
        return self.__torch_function__(Tensor.__getitem__, (), (self, index))

    @property
    def shape(self) -> torch.Size:
        shape = self._param.shape
        return torch.Size((*shape[:-2], shape[-1], shape[-2])) if self._transposed else shape

    @property
    def mT(self) -> Any:  # noqa: N802 # torch's name
        return self.transpose(-2, -1)

    def transpose(self, first: int, second: int) -> Any:
        return self.__torch_function__(Tensor.transpose, (), (self, first, second))

    def __getattr__(self, name: str) -> Any:
        known = name in ("dtype", "device", "requires_grad")
        return getattr(self._param if known else self._whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = next((argument for argument in args if isinstance(argument, _Matrices)), None)
        result = NotImplemented if used is None else used.call(func, args, kwargs)
        if result is not NotImplemented:
            return result
        whole = [each._whole() if isinstance(each, _Matrices) else each for each in args]
        return func(*whole, **kwargs)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` if it uses single experts, else NotImplemented."""
        name = getattr(func, "__name__", "")
        if func == Tensor.__getitem__:
            return self._at(args[1])
        if self._is_transpose(func, args, kwargs):
            return _Matrices(self._param, self._slices, transposed=not self._transposed)
        if name.split(".")[0] in _GROUPED and len(args) == 2 and self._param.dim() == 3:
            rows, offsets = args[0], kwargs.get("offs")
            plain = kwargs.get("bias") is None and kwargs.get("out_dtype") is None
            if plain and isinstance(offsets, Tensor) and isinstance(rows, Tensor) and rows.dim() == 2:
                return self._grouped_mm(rows, offsets)
        return NotImplemented

    def _at(self, index: Any) -> Any:
        if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype is not torch.bool:
            if index.dim() == 1:
                return self._stacked(index)
            if not index.dim():
                return self._matrix(int(index))
        if isinstance(index, int) and not isinstance(index, bool):
            return self._matrix(index)
        return NotImplemented

    def _matrix(self, expert: int) -> Tensor:
        matrix = self._slices[expert]
        return matrix.transpose(-2, -1) if self._transposed else matrix

    def _stacked(self, experts: Tensor) -> Tensor:
        """A copy of the matrices of ``experts``. Each is fetched once."""
        param, order = self._param, experts.tolist()
        stacked = torch.empty((len(order), *param.shape[1:]), dtype=param.dtype, device=param.device)
        for expert in dict.fromkeys(order):
            stacked[[at for at, each in enumerate(order) if each == expert]] = self._slices[expert].detach()
        return stacked.transpose(-2, -1) if self._transposed else stacked

    def _grouped_mm(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The rows up to each of ``offsets``, multiplied with the matrix of its expert. Rows behind are zero."""
        products, start = [], 0
        # As grouped_mm, this does not take part in autocast.
        with torch.autocast(rows.device.type, enabled=False):
            for expert, end in enumerate(offsets.tolist()):
                if start < end:
                    products.append(rows[start:end] @ self._matrix(expert))
                    start = end
        if start < rows.shape[0] or not products:
            products.append(rows.new_zeros(rows.shape[0] - start, self.shape[-1]))
        return torch.cat(products)

    def _whole(self) -> Tensor:
        # Through a view, so that the read is not divided again.
        whole = self._param.view(self._param.shape)
        return whole.transpose(-2, -1) if self._transposed else whole

    @staticmethod
    def _is_transpose(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if func == Tensor.mT.__get__:  # type: ignore[attr-defined] # a getter of torch
            return True
        if getattr(func, "__name__", "") != "transpose" or kwargs or len(args) != 3:
            return False
        return {dim % 3 for dim in args[1:] if isinstance(dim, int)} == {1, 2}
