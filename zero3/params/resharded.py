"""The classes of a parameter while its bytes are on another tier, and while it shows them.

Note [A resharded parameter points nowhere]
    A read of freed memory through a parameter would end the process. So while its group is resharded, a parameter holds
    one NaN, expanded to its shape, in a storage that torch cannot read (storages.py). It also gets another class,
    which sees torch's operations on it (``__torch_function__``), except in code that bypasses classes. Shape, dtype,
    gradient and hooks stay available. An operation that needs the values unshards the group while a forward or backward
    is running (a module reads another module's weight without calling it); at other times it raises ResidencyError with
    the remedy. Operations that copy return a copy: a module's ``state_dict``, ``copy.deepcopy``, pickling.

    A parameter that shows its bytes is a plain one for torch, except for the properties ``.data`` and ``.grad``. A
    change through ``.data`` makes no new version, so the owner compares the bytes. The owner takes each gradient as
    soon as autograd has made it: ``.grad`` then reads as None, and an assigned gradient goes to the owner.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tiering.errors import ResidencyError
from zero3.params import gradient_edges
from zero3.params.compilation import cuts_compiled_code, eager
from zero3.params.fused_experts import read_experts
from zero3.ranks.joining import standing

# Properties that need the values; all others are metadata.
VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_NEEDS_NO_VALUES = """
    size dim ndimension numel nelement element_size storage_offset get_device is_floating_point is_complex
    is_signed is_shared is_pinned is_inference has_names is_tensor is_same_size result_type can_cast
    _is_view _has_compatible_shallow_copy_type __len__ __dir__ __hash__
    empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full new_tensor
    register_hook register_post_accumulate_grad_hook requires_grad_
"""
METADATA = frozenset(_NEEDS_NO_VALUES.split())

_DATA, _GRAD = (vars(torch._C.TensorBase)[name] for name in ("data", "grad"))  # torch's own properties
CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16, "double": torch.float64}


Result = TypeVar("Result")


class Owner(Protocol):
    """Moves parameters, and serves the operations on resharded ones."""

    @property
    def partitioned(self) -> bool:
        """Whether DeepSpeed would partition the parameters: at stage 3, and under zero.Init."""

    def borrow(self, param: nn.Parameter) -> bool:
        """Make the values of ``param`` usable in the running forward or backward; False if none is running."""

    def copy_of(self, param: nn.Parameter) -> Tensor:
        """A copy of the values, on the parameter's device."""

    def copy_to_save(self, param: nn.Parameter) -> Tensor | None:
        """A copy or a placeholder for the ``state_dict`` call that is running; None if none is running."""

    def store(self, param: nn.Parameter, values: Tensor) -> bool:
        """``param.copy_(values)`` is called: keep ``values``, rounded. False while a pass is running."""

    def on_gradient_read(self, param: nn.Parameter) -> None:
        """``param.grad`` is read."""

    def gradient_assigned(self, param: nn.Parameter, values: Tensor | None) -> bool:
        """``param.grad`` is set. True if the owner keeps the gradient, False if the parameter does."""

    def on_data_read(self, param: nn.Parameter) -> None:
        """``param.data`` is read, and may be changed without a new version."""

    def where(self, param: nn.Parameter) -> str:
        """The name of ``param`` and the location of its bytes, for an error."""

    def remedy(self) -> str:
        """The reason why values cannot be used now, and the remedy, as text for an error."""

    def show_values(self, param: nn.Parameter, *, modify: bool) -> None:
        """Let ``param`` show its values until ``hide_values``."""

    def hide_values(self, param: nn.Parameter, *, modify: bool, rank: int | None) -> str:
        """End ``show_values`` and keep the changes of ``rank``. Returns why they cannot be kept, or an empty text."""

    def call_with(self, params: Sequence[nn.Parameter], function: Callable[[], Result]) -> Result:
        """Call ``function``, which calls the modules of ``params`` many times: they are fetched once."""

    def saving_copies(self) -> AbstractContextManager[Any]:
        """A context in which tensors that autograd saves keep the values that parameters show."""


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> weak reference to its Owner


def adopt(params: Iterable[nn.Parameter], owner: Owner) -> None:
    """Make ``owner`` the owner of ``params``."""
    # Weak: a model outlives its engine, and its parameters must not keep the memory of all tiers.
    reference = weakref.ref(owner)
    for param in params:
        _owners[param] = reference


def disown(params: Iterable[nn.Parameter]) -> None:
    """Make ``params`` unusable for good, because their engine is closed."""
    for param in params:
        _owners[param] = _nobody


def owner_of(param: Tensor) -> Owner | None:
    """The owner of ``param``; None for an ordinary parameter, and if the engine was freed."""
    reference: Callable[[], Owner | None] = _owners.get(param, _nobody)
    return reference()


def is_adopted(param: Tensor) -> bool:
    """Whether ``param`` has an owner, or had one that was closed or dropped."""
    return param in _owners or isinstance(param, _Resharded | _Shown)


def release(param: nn.Parameter) -> None:
    """Make ``param`` a plain parameter without an owner."""
    _owners.pop(param, None)
    make_plain(param)


class ZeroParamStatus(Enum):
    """DeepSpeed's names for the residency of a parameter. One on its way to the device is NOT_AVAILABLE here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Partitioned:
    """Mixed in always: attributes of DeepSpeed's partitioned parameters, which scripts read. They are read-only."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        if isinstance(self, _Resharded):
            return ZeroParamStatus.NOT_AVAILABLE
        assert isinstance(self, nn.Parameter)
        owner = owner_of(self)
        if owner is None or not owner.partitioned:
            raise AttributeError("a parameter has DeepSpeed's attributes ds_... at stage 3 only")
        return ZeroParamStatus.AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        assert isinstance(self, nn.Parameter) and self.ds_status
        return self.shape

    @property
    def ds_numel(self) -> int:
        assert isinstance(self, nn.Parameter) and self.ds_status
        return self.numel()

    def partition_numel(self) -> int:
        """The number of elements of one rank's part."""
        return -(-self.ds_numel // standing()[1])


class _Graded:
    """Mixed in always: reports reads and writes of ``.grad`` to the owner."""

    @property
    def grad(self) -> Tensor | None:
        assert isinstance(self, nn.Parameter)
        _note_gradient_read(self)
        return _gradient_on(self)

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        assert isinstance(self, nn.Parameter)
        owner = None if torch.compiler.is_compiling() else owner_of(self)
        owner_keeps = (
            owner is not None and isinstance(values, Tensor | None) and owner.gradient_assigned(self, values)
        )
        if not owner_keeps:
            put_gradient(self, values)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class _Resharded(_Graded, _Partitioned):
    """Mixed into the class of a parameter while its bytes are elsewhere.

    Only then is there ``ds_id``: scripts test for it to find parameters to gather, and some then assert the status.
    """

    @property
    def ds_id(self) -> int:
        return id(self)

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("stride", "is_contiguous"):
            # The same answer as for a parameter that shows its values.
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if func in gradient_edges.CALLS:
            return gradient_edges.differentiate(func, args, kwargs, lambda each: isinstance(each, _Resharded))
        of_experts = read_experts(func, args, kwargs)
        if of_experts is not NotImplemented:
            return of_experts
        for param in _resharded_among((args, kwargs)):
            if not isinstance(param, _Resharded):
                # It was unsharded with an earlier parameter of its group.
                continue
            owner = owner_of(param)
            if owner is not None and cuts_compiled_code():
                raise ResidencyError(
                    f"{owner.where(param)}, is read by compiled code of another module, which would break the graph"
                    " there, differently for each placement. Read it in a function that is marked with"
                    " torch.compiler.disable, or do not compile the module that reads it"
                )
            if owner is not None and func is Tensor.detach:
                saved = owner.copy_to_save(param)
                if saved is not None:
                    return saved
            if owner is not None and func is Tensor.copy_ and _stores(owner, param, args):
                return param
            replaces = getattr(func, "__name__", "") == "__set__"
            if owner is None or replaces or not owner.borrow(param):
                raise ResidencyError(_refusal(owner, param, func))
            if func == _DATA.__get__:
                owner.on_data_read(param)
        # Once more: room for the last parameter may have been made by releasing the group of an earlier one.
        for param in _resharded_among((args, kwargs)):
            owner = owner_of(param)
            assert owner is not None
            raise ResidencyError(
                f"{getattr(func, '__name__', func)} reads {owner.where(param)}, and other parameters: the device has no"
                " room for all of them. Raise device_budget, or stage3_prefetch_bucket_size if the budget has room"
            )
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        assert isinstance(self, nn.Parameter)
        owner = owner_of(self)
        state = owner.where(self) if owner is not None else "its engine is closed"
        return f"Parameter of shape {tuple(self.shape)}, {self.dtype}, resharded: {state}"


class _Shown(_Graded, _Partitioned):
    """Mixed into the class of a parameter while it shows its bytes: reports reads of ``.data`` and ``.grad``."""

    @property
    def data(self) -> Tensor:
        assert isinstance(self, nn.Parameter)
        # Compiled code reads .data only for its class, at its first run; it must not count as an edit forever.
        by_compiler = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._functorch.")
        if not by_compiler and (owner := owner_of(self)) is not None:
            owner.on_data_read(self)
        return data_of(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        assert isinstance(self, nn.Parameter)
        set_data(self, values)


class _Copied:
    """Mixed in always: copies of the parameter are plain parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        assert isinstance(self, nn.Parameter)
        if id(self) not in memo:
            memo[id(self)] = _plain_copy(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        assert isinstance(self, nn.Parameter)
        return _plain_copy(self).__reduce_ex__(protocol)


@cache
def resharded_form(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``plain`` takes while its bytes are elsewhere."""
    # The same name: libraries know parameters of bitsandbytes by it.
    return type(plain.__name__, (_Resharded, _Copied, plain), {"__module__": __name__})


@cache
def shown_form(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``plain`` takes while it shows its bytes."""
    return type(plain.__name__, (_Shown, _Copied, plain), {"__module__": __name__})


def plain_form(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``kind`` had before it was adopted."""
    return kind.__bases__[-1] if issubclass(kind, _Resharded | _Shown) else kind


def is_resharded(param: nn.Parameter) -> bool:
    """Whether the bytes of ``param`` are elsewhere."""
    return isinstance(param, _Resharded)


def bring(param: nn.Parameter, func: Callable[..., Any]) -> None:
    """Make the values of ``param`` usable for ``func`` in the running pass; ResidencyError if none is running."""
    if isinstance(param, _Resharded):
        owner = owner_of(param)
        if owner is None or not owner.borrow(param):
            raise ResidencyError(_refusal(owner, param, func))


def make_plain(param: nn.Parameter) -> None:
    """Give ``param`` the class back that it had before it was adopted."""
    if isinstance(param, _Resharded | _Shown):
        param.__class__ = plain_form(type(param))  # type: ignore[assignment] # it was one of these before


def data_of(param: nn.Parameter) -> Tensor:
    """``param.data``, without a report to the owner."""
    values: Tensor = _DATA.__get__(param)
    return values


def set_data(param: nn.Parameter, values: Tensor) -> None:
    """Assign ``values`` to ``param.data``; ``param`` is not resharded."""
    _DATA.__set__(param, values)


def take_gradient(param: nn.Parameter) -> Tensor | None:
    """Remove and return the gradient that autograd has accumulated on ``param``."""
    gradient = _gradient_on(param)
    if gradient is not None:
        put_gradient(param, None)
    return gradient


def holds_gradient(param: nn.Parameter) -> bool:
    """Whether autograd has put a gradient on ``param`` that was not taken."""
    return _gradient_on(param) is not None


def _gradient_on(param: nn.Parameter) -> Tensor | None:
    # No value of the parameter is read.
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRAD.__get__(param)
    return gradient


def put_gradient(param: nn.Parameter, gradient: Tensor | None) -> None:
    """Put ``gradient`` where autograd would, for ``take_gradient``; None drops the present gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(param, gradient)


def _note_gradient_read(param: nn.Parameter) -> None:
    owner = owner_of(param)
    # The compiler reads all attributes.
    if owner is not None and not torch.compiler.is_compiling():
        owner.on_gradient_read(param)


def _plain_copy(param: nn.Parameter) -> nn.Parameter:
    owner = owner_of(param)
    if isinstance(param, _Shown):
        return nn.Parameter(data_of(param).clone(), requires_grad=param.requires_grad)
    if owner is None:
        raise ResidencyError(_refusal(None, param, copying))
    return nn.Parameter(owner.copy_of(param), requires_grad=param.requires_grad)


def copying() -> None:
    """Names the operation in an error about a copy."""


def _nobody() -> None:
    return None


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether ``func`` reads or sets only what is known without the values."""
    accessor = getattr(func, "__name__", "")
    if accessor in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in VALUES
    return accessor in METADATA


def _changes_nothing(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` casts or moves a parameter to its own dtype and device, or sets its data to itself."""
    name, param = getattr(func, "__name__", ""), args[0] if args else None
    if name == "__set__":
        return len(args) == 2 and args[1] is param
    if not isinstance(param, _Resharded) or kwargs.get("copy"):
        return False
    assert isinstance(param, nn.Parameter)
    if name in CASTS:
        return len(args) == 1 and not kwargs and param.dtype == CASTS[name]
    if name in ("cpu", "cuda"):
        return len(args) == 1 and not kwargs and param.device.type == name
    if name != "to":
        return False
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    same_device = device is None or (
        device.type == param.device.type and device.index in (None, param.device.index)
    )
    return same_device and dtype in (None, param.dtype) and memory_format is None


def _stores(owner: Owner, param: nn.Parameter, args: Any) -> bool:
    """Whether ``owner`` keeps the values of ``param.copy_(values)``, as ``load_state_dict`` calls it."""
    # Torch refuses an in-place change of a leaf that autograd tracks.
    tracked = torch.is_grad_enabled() and param.requires_grad
    copies_into_param = args[0] is param and len(args) > 1 and isinstance(args[1], Tensor)
    return (
        copies_into_param and not tracked and not _resharded_among(args[1:]) and owner.store(param, args[1])
    )


def _resharded_among(arguments: Any) -> list[nn.Parameter]:
    params: list[nn.Parameter] = []
    if isinstance(arguments, dict):
        arguments = arguments.values()
    for argument in arguments:
        if isinstance(argument, _Resharded):
            assert isinstance(argument, nn.Parameter)
            params.append(argument)
        elif isinstance(argument, list | tuple | dict):
            params += _resharded_among(argument)
    return params


def _refusal(owner: Owner | None, param: nn.Parameter, func: Callable[..., Any]) -> str:
    operation = func.__name__.strip("_")
    if operation in ("get", "set"):
        operation = f"{operation} .{func.__self__.__name__}"  # type: ignore[attr-defined] # of a property
    if owner is None:
        return (
            f"{operation} of a parameter of shape {tuple(param.shape)} whose engine is closed, or belongs to the"
            " process that forked this one: it has no values; call engine.state_dict() before close(), or end the"
            " engine with release(), which keeps the values in the model"
        )
    return f"{operation} of {owner.where(param)}: {owner.remedy()}"
