"""What a parameter is while its bytes are on another tier.

Note [A resharded parameter points nowhere]
    Reading freed memory through a parameter would end the process, so while its group is resharded it holds one NaN
    expanded to its shape, in a storage that torch refuses to read (closed_storage.py). It also changes its class, to
    one that sees the operations of torch on it (``__torch_function__``), but for code that bypasses classes. Shape,
    dtype, gradient and hooks are there as always. What needs the values unshards the group while a forward or backward
    is running (a module read another's weight without calling it); while none is, it raises ResidencyError with the
    remedy. Copies are given where a copy is what was asked for: a module's ``state_dict``, ``copy.deepcopy``, pickling.

    A parameter that shows its bytes is a plain one for torch. Only ``.data`` and ``.grad`` are properties of ours then:
    what is changed through .data no version tells, so its owner compares. A gradient is at its owner from the moment
    that autograd has made it: ``.grad`` is None where people expect one, and one that is assigned goes to the owner.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tiering.errors import ResidencyError
from zero3.params import gradient_edges
from zero3.params.compiled_modules import cuts_compiled_code
from zero3.params.eager import eager

# What torch may ask of a parameter without its values. Properties other than these few are metadata, too.
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


class Owner(Protocol):
    """Whoever moves the parameters: what a resharded one asks for."""

    def borrow(self, param: nn.Parameter) -> bool:
        """Make the values of ``param`` usable for what is running now; False if nothing is."""

    def copy_of(self, param: nn.Parameter) -> Tensor:
        """A copy of the values, on the parameter's device."""

    def copy_to_save(self, param: nn.Parameter) -> Tensor | None:
        """A copy for the ``state_dict`` that is being made; None if none is."""

    def on_gradient_read(self, param: nn.Parameter) -> None:
        """Somebody reads ``param.grad``."""

    def gradient_assigned(self, param: nn.Parameter, values: Tensor | None) -> bool:
        """Somebody sets ``param.grad``; whether the owner keeps it, and not the parameter."""

    def on_data_read(self, param: nn.Parameter) -> None:
        """Somebody reads ``param.data``, and may change it without torch counting a version."""

    def where(self, param: nn.Parameter) -> str:
        """Name of ``param`` and where its bytes are, as an error says it."""

    def remedy(self) -> str:
        """Why its values cannot be used now, and what to do."""

    def show_values(self, param: nn.Parameter, *, modify: bool) -> None:
        """Let ``param`` show its values until ``hide_values``."""

    def hide_values(self, param: nn.Parameter, *, modify: bool, rank: int) -> str:
        """End ``show_values`` and keep the changes of ``rank``. Returns why they cannot be kept, or an empty text."""

    def saving_copies(self) -> AbstractContextManager[Any]:
        """What autograd saves of lent parameters keeps what they show."""


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> weak reference to its Owner


def adopt(params: Iterable[nn.Parameter], owner: Owner) -> None:
    """From now on ``owner`` is asked for the values of ``params``."""
    reference = weakref.ref(owner)
    for param in params:
        _owners[param] = reference


def disown(params: Iterable[nn.Parameter]) -> None:
    """``params`` never become usable again: their engine is closed."""
    for param in params:
        _owners[param] = _nobody


def owner_of(param: Tensor) -> Owner | None:
    """Who moves ``param``; None for an ordinary one, and where the engine is gone."""
    reference: Callable[[], Owner | None] = _owners.get(param, _nobody)
    return reference()


def is_adopted(param: Tensor) -> bool:
    """Whether ``param`` belongs to an owner, or did when that was closed or dropped."""
    return param in _owners or isinstance(param, _Resharded | _Shown)


def release(param: nn.Parameter) -> None:
    """Make ``param`` a plain one that nobody owns."""
    _owners.pop(param, None)
    make_plain(param)


class ZeroParamStatus(Enum):
    """DeepSpeed's words for whether a parameter shows its values. Those that do are ordinary here, and tell none."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Graded:
    """Mixed in always: whoever reads ``.grad`` or sets it meets the owner."""

    @property
    def grad(self) -> Tensor | None:
        assert isinstance(self, nn.Parameter)
        _note_gradient_read(self)
        return _gradient_on(self)

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        assert isinstance(self, nn.Parameter)
        owner = None if torch.compiler.is_compiling() else owner_of(self)
        taken = (
            owner is not None and isinstance(values, Tensor | None) and owner.gradient_assigned(self, values)
        )
        if not taken:
            put_gradient(self, values)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class _Resharded(_Graded):
    """Mixed into the class of a parameter while its bytes are elsewhere.

    ``ds_...`` are what scripts look for to know that they have to gather it: ``if hasattr(param, "ds_id")``.
    """

    ds_status = ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_id(self) -> int:
        return id(self)

    @property
    def ds_shape(self) -> torch.Size:
        assert isinstance(self, nn.Parameter)
        return self.shape

    @property
    def ds_numel(self) -> int:
        assert isinstance(self, nn.Parameter)
        return self.numel()

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("stride", "is_contiguous"):
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)  # as when it is shown
        if _is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if func in gradient_edges.CALLS:
            return gradient_edges.differentiate(func, args, kwargs, lambda each: isinstance(each, _Resharded))
        for param in _resharded_among((args, kwargs)):
            if not isinstance(param, _Resharded):
                continue  # came along with one before it
            owner = owner_of(param)
            if owner is not None and cuts_compiled_code():
                raise ResidencyError(
                    f"{owner.where(param)}, is read by compiled code of a module that is not its own, which would be"
                    " cut there: differently for each placement. Read it in a function that is marked with"
                    " torch.compiler.disable, or leave the module that reads it uncompiled"
                )
            if owner is not None and func is Tensor.detach:
                saved = owner.copy_to_save(param)
                if saved is not None:
                    return saved
            replaces = getattr(func, "__name__", "") == "__set__"
            if owner is None or replaces or not owner.borrow(param):
                raise ResidencyError(_refusal(owner, param, func))
            if func == _DATA.__get__:
                owner.on_data_read(param)
        for param in _resharded_among((args, kwargs)):
            owner = owner_of(param)
            assert owner is not None
            raise ResidencyError(
                f"{getattr(func, '__name__', func)} reads {owner.where(param)}, and others at once: there is no room on"
                " the device for all of them. Raise device_budget, or stage3_prefetch_bucket_size if the budget has"
                " room"
            )
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        assert isinstance(self, nn.Parameter)
        owner = owner_of(self)
        state = owner.where(self) if owner is not None else "its engine is closed"
        return f"Parameter of shape {tuple(self.shape)}, {self.dtype}, resharded: {state}"


class _Shown(_Graded):
    """Mixed into the class of a parameter while it shows its bytes: an ordinary one, whose owner hears of two reads."""

    @property
    def data(self) -> Tensor:
        assert isinstance(self, nn.Parameter)
        # Compiled code asks for its class alone when it first runs, and would count as an editor for good.
        by_compiler = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._functorch.")
        if not by_compiler and (owner := owner_of(self)) is not None:
            owner.on_data_read(self)
        return data_of(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        assert isinstance(self, nn.Parameter)
        set_data(self, values)


class _Copied:
    """Mixed in always: copies are plain parameters."""

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
    return type(f"Resharded{plain.__name__}", (_Resharded, _Copied, plain), {"__module__": __name__})


@cache
def shown_form(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``plain`` takes while it shows its bytes."""
    return type(plain.__name__, (_Shown, _Copied, plain), {"__module__": __name__})


def plain_form(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``kind`` had before it was adopted."""
    return kind.__bases__[-1] if issubclass(kind, _Resharded | _Shown) else kind


def make_plain(param: nn.Parameter) -> None:
    """Give ``param`` the class back that it had before it was adopted."""
    if isinstance(param, _Resharded | _Shown):
        param.__class__ = plain_form(type(param))  # type: ignore[assignment] # it was one of these before


def data_of(param: nn.Parameter) -> Tensor:
    """What ``param.data`` gives, and nobody hears of it."""
    values: Tensor = _DATA.__get__(param)
    return values


def set_data(param: nn.Parameter, values: Tensor) -> None:
    """What ``param.data = values`` does; ``param`` is not resharded."""
    _DATA.__set__(param, values)


def take_gradient(param: nn.Parameter) -> Tensor | None:
    """What autograd has accumulated on ``param``, which has none then."""
    gradient = _gradient_on(param)
    if gradient is not None:
        put_gradient(param, None)
    return gradient


def holds_gradient(param: nn.Parameter) -> bool:
    """Whether autograd has put a gradient on ``param`` and nobody has taken it."""
    return _gradient_on(param) is not None


def _gradient_on(param: nn.Parameter) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():  # no value of the parameter is read
        gradient: Tensor | None = _GRAD.__get__(param)
    return gradient


def put_gradient(param: nn.Parameter, gradient: Tensor | None) -> None:
    """Put ``gradient`` where autograd would, for ``take_gradient``; None drops the one that is there."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(param, gradient)


def _note_gradient_read(param: nn.Parameter) -> None:
    owner = owner_of(param)
    if owner is not None and not torch.compiler.is_compiling():  # the compiler looks at all there is
        owner.on_gradient_read(param)


def _plain_copy(param: nn.Parameter) -> nn.Parameter:
    owner = owner_of(param)
    if isinstance(param, _Shown):
        return nn.Parameter(data_of(param).clone(), requires_grad=param.requires_grad)
    if owner is None:
        raise ResidencyError(_refusal(None, param, copying))
    return nn.Parameter(owner.copy_of(param), requires_grad=param.requires_grad)


def copying() -> None:
    """Stands for copying where an error names what was tried."""


def _nobody() -> None:
    return None


def _is_metadata(func: Callable[..., Any]) -> bool:
    accessor = getattr(func, "__name__", "")
    if accessor in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in VALUES
    return accessor in METADATA


def _changes_nothing(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` casts or moves a parameter to what it is, as module.to() does, or sets its data to itself."""
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
            " process that forked this one: it has no values; take engine.state_dict() before, or end the engine by"
            " engine.release(), which keeps them in the model"
        )
    return f"{operation} of {owner.where(param)}: {owner.remedy()}"
