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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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


class Experts(ABC):
    """The matrices of all experts, perhaps ``transposed``, in place of a tensor [experts, rows, columns].

    Reads of single experts are done with ``matrix``, everything else with ``whole``. ``shape`` is the one without the
    transposition.
    """

    dtype: torch.dtype
    device: torch.device
    requires_grad = False

    def __init__(self, shape: Sequence[int], *, transposed: bool = False) -> None:
        self._shape = tuple(shape)
        self.transposed = transposed

    @abstractmethod
    def matrix(self, expert: int) -> Any:
        """The matrix of one expert, in its own memory, or something that torch's products take for it."""

    @abstractmethod
    def values(self, expert: int) -> Tensor:
        """The values of the matrix of one expert in ``dtype``, not transposed."""

    @abstractmethod
    def whole(self) -> Tensor:
        """All matrices."""

    @abstractmethod
    def turned(self) -> Experts:
        """The matrices transposed once more."""

    def stacked(self, experts: Sequence[int]) -> Tensor:
        """A copy of the matrices of ``experts``, not transposed. Each expert is fetched once."""
        stacked = torch.empty((len(experts), *self._shape[1:]), dtype=self.dtype, device=self.device)
        for expert in dict.fromkeys(experts):
            stacked[[at for at, each in enumerate(experts) if each == expert]] = self.values(expert)
        return stacked

    @property
    def shape(self) -> torch.Size:
        first, rows, columns = self._shape
        return torch.Size((first, columns, rows) if self.transposed else self._shape)

    @property
    def mT(self) -> Any:  # noqa: N802 # torch's name
        return self.transpose(-2, -1)

    def transpose(self, first: int, second: int) -> Any:
        return self.__torch_function__(Tensor.transpose, (), (self, first, second))

    def __getitem__(self, index: Any) -> Any:
        return self.__torch_function__(Tensor.__getitem__, (), (self, index))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("dtype", "device"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = next(each for each in (*args, *kwargs.values()) if isinstance(each, Experts))
        if getattr(func, "__module__", "") == "torch.nn.init":
            # Initializers of transformers, which have no values for frozen matrices that come from files.
            return used
        result = used.call(func, args, kwargs)
        if result is not NotImplemented:
            return result
        return func(*map(_as_whole, args), **{name: _as_whole(each) for name, each in kwargs.items()})

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` if it uses single experts, else NotImplemented."""
        if func == Tensor.__getitem__:
            return self._at(args[1])
        if _is_transpose(func, args, kwargs):
            return self.turned()
        if getattr(func, "__name__", "").split(".")[0] in _GROUPED and len(args) == 2:
            rows, offsets = args[0], kwargs.get("offs")
            plain = kwargs.get("bias") is None and kwargs.get("out_dtype") is None
            if plain and isinstance(offsets, Tensor) and isinstance(rows, Tensor) and rows.dim() == 2:
                return _GroupedProduct.apply(rows, offsets, self)  # type: ignore[no-untyped-call]
        return NotImplemented

    def _at(self, index: Any) -> Any:
        if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype is not torch.bool:
            if index.dim() == 1:
                stacked = self.stacked(index.tolist())
                return stacked.transpose(-2, -1) if self.transposed else stacked
            if not index.dim():
                return self.matrix(int(index))
        if isinstance(index, int) and not isinstance(index, bool):
            return self.matrix(index)
        return NotImplemented

    def grouped_mm(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The rows up to each of ``offsets``, multiplied with the matrix of its expert. Rows behind are zero."""
        products, start = [], 0
        # As grouped_mm, this does not take part in autocast.
        with torch.autocast(rows.device.type, enabled=False):
            for expert, end in enumerate(offsets.tolist()):
                if start < end:
                    products.append(rows[start:end] @ self.matrix(expert))
                    start = end
        if start < rows.shape[0] or not products:
            products.append(rows.new_zeros(rows.shape[0] - start, self.shape[-1]))
        return torch.cat(products)


class _GroupedProduct(torch.autograd.Function):
    """``Experts.grouped_mm`` as one operation: backward takes its offsets from what autograd saved, as torch's does.

    A checkpoint's recomputation may have routed the rows in another way than the forward.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, experts: Experts) -> Tensor:
        ctx.experts = experts
        ctx.save_for_backward(offsets)
        return experts.grouped_mm(rows, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return ctx.experts.turned().grouped_mm(gradient, offsets), None, None


class _Matrices(Experts):
    """The experts of a resharded parameter, which are read from its ``slices``."""

    def __init__(
        self, param: nn.Parameter, slices: Sequence[nn.Parameter], *, transposed: bool = False
    ) -> None:
        super().__init__(param.shape, transposed=transposed)
        self.dtype, self.device = param.dtype, param.device
        self._param = param
        self._slices = slices

    def matrix(self, expert: int) -> Tensor:
        matrix = self._slices[expert]
        return matrix.transpose(-2, -1) if self.transposed else matrix

    def values(self, expert: int) -> Tensor:
        return self._slices[expert].detach()

    def whole(self) -> Tensor:
        # Through a view, so that the read is not divided again.
        whole = self._param.view(self._param.shape)
        return whole.transpose(-2, -1) if self.transposed else whole

    def turned(self) -> _Matrices:
        return _Matrices(self._param, self._slices, transposed=not self.transposed)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Codes and scales have no matrices: they are read by expert.
        if self._param.dim() != 3 and func != Tensor.__getitem__:
            return NotImplemented
        return super().call(func, args, kwargs)


def _as_whole(argument: Any) -> Any:
    return argument.whole() if isinstance(argument, Experts) else argument


def _is_transpose(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func == Tensor.mT.__get__:  # type: ignore[attr-defined] # a getter of torch
        return True
    if getattr(func, "__name__", "") != "transpose" or kwargs or len(args) != 3:
        return False
    return {dim % 3 for dim in args[1:] if isinstance(dim, int)} == {1, 2}
