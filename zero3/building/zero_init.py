"""Builds a model without memory for its parameters: ``tiering.zero.Init``.

    with tiering.zero.Init():
        model = Model()                  # an ordinary build; a parameter's memory goes when the next ones are written
    engine, *_ = tiering.initialize(model=model, config=config)

Under ``Init`` all code runs as it would without, on a tape (see tape.py): with the same random numbers and values. When
the context ends, parameters have no memory; ``initialize`` computes their values again, one parameter at a time, on
their way to the tiers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tiering.errors import ConfigError, EngineStateError
from zero3.building.recorded_operations import Slice
from zero3.building.tape import Tape
from zero3.params import resharded
from zero3.params.resharded import Result


class Init:
    """Within this context a model is built as usual, but its parameters do not stay in memory.

    Afterwards they have shapes and dtypes, but no values before ``initialize``: using one raises ResidencyError.
    Values that were not computed by torch operations inside the context (from numpy, or a file) stay in memory.

    With ``enabled`` False the context has no effect. ``dtype`` is torch's default dtype inside: parameters are built
    and get their first values in it. Without it they keep the dtype of the model's code, and masters that precision.
    The other arguments are DeepSpeed's and have no effect: ``initialize`` places the parameters.

    For one thread, and not reentrant: the context replaces ``nn.Module.register_parameter`` for the process.
    """

    _register = nn.Module.register_parameter
    _deepcopy: Callable[..., Any] = nn.Parameter.__deepcopy__

    # The signature is that of DeepSpeed's zero.Init.
    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: object = None,
        param_swapper: object = None,
        tensor_overrides: object = None,
    ) -> None:
        if module is not None:
            raise ConfigError(
                "zero.Init(module=...) is not supported in this version: build the model inside the context"
            )
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise ConfigError(
                "zero.Init(zero_quantized_weights=...) is not supported: it would round the weights; remove it"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(
                f"zero.Init(dtype={dtype}): not a floating-point dtype; use torch.float32 or torch.bfloat16"
            )
        self.tape = Tape()
        self._enabled = enabled
        self._dtype = dtype
        self._usual_dtype = torch.get_default_dtype()

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        if nn.Module.register_parameter is not Init._register:
            raise EngineStateError("zero.Init is already open: build the whole model in one context")
        tape = self.tape

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            Init._register(module, name, param)
            if param is not None and not resharded.is_adopted(param):
                tape.may_free(param)

        def copied(param: nn.Parameter, memo: dict[int, Any]) -> Any:
            copied = Init._deepcopy(param, memo)
            tape.may_free(copied)
            return copied

        # mypy: both are replaced on purpose; the second because a copied module registers no parameter.
        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign,assignment]
        tape.__enter__()
        self._usual_dtype = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        if self._dtype is not None:
            torch.set_default_dtype(self._usual_dtype)
        # mypy: put back.
        nn.Module.register_parameter = Init._register  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = Init._deepcopy  # type: ignore[method-assign]
        self.tape.__exit__(kind, error, trace)
        hide(self.tape)


class Recipe(NamedTuple):
    """The recorded operations that compute the values of a parameter without memory."""

    tape: Tape
    slice: Slice

    def make(self) -> Tensor:
        return self.tape.replay(self.slice)


class _Unbuilt:
    """The owner of parameters that have no memory yet. See ``resharded.Owner``."""

    partitioned = True

    def borrow(self, param: nn.Parameter) -> bool:
        return False

    def __init__(self) -> None:
        # Parameter that shows values -> its version and address when they were set.
        self._versions: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def show_values(self, param: nn.Parameter, *, modify: bool) -> None:
        if param in self._versions:
            raise EngineStateError(
                f"{self.where(param)}, is already gathered; gathered() blocks cannot be nested"
            )
        values = self.copy_of(param)
        param.__class__ = resharded.shown_form(resharded.plain_form(type(param)))
        resharded.set_data(param, values)
        self._versions[param] = param._version, values.data_ptr()

    def hide_values(self, param: nn.Parameter, *, modify: bool, rank: int | None) -> str:
        edited = self._versions.pop(param) != (param._version, param.data_ptr())
        if modify and rank == 0:
            # ``initialize`` takes the values of rank 0.
            resharded.release(param)
            forget([param])
            return ""
        _hide(param)
        if modify:
            return f"rank {rank} cannot set {self.where(param)}: initialize takes the values of rank 0; set it there"
        return f"{self.where(param)}, was changed without modify=True" if edited else ""

    def call_with(self, params: Sequence[nn.Parameter], function: Callable[[], Result]) -> Result:
        return function()

    def saving_copies(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy_of(self, param: nn.Parameter) -> Tensor:
        recipe: Recipe = _recipes[param]
        return recipe.make().clone()

    def copy_to_save(self, param: nn.Parameter) -> Tensor | None:
        """A placeholder without values: a loader reads the names, shapes and dtypes of a new model's ``state_dict``."""
        if not _in_state_dict():
            return None
        return torch.empty(param.shape, dtype=param.dtype, device="meta")

    def store(self, param: nn.Parameter, values: Tensor) -> bool:
        """Make ``param`` an ordinary parameter with ``values``, in memory."""
        memory = values.detach().to(param.dtype).expand(param.shape).clone()
        resharded.release(param)
        resharded.set_data(param, memory)
        forget([param])
        return True

    def on_gradient_read(self, param: nn.Parameter) -> None: ...

    def gradient_assigned(self, param: nn.Parameter, values: Tensor | None) -> bool:
        """No engine keeps gradients yet."""
        return False

    def on_data_read(self, param: nn.Parameter) -> None: ...

    def where(self, param: nn.Parameter) -> str:
        return f"a parameter of shape {tuple(param.shape)} that was built without memory"

    def remedy(self) -> str:
        return (
            "it has no values before tiering.initialize. Read or set initial values inside the zero.Init context, or"
            " inside `with tiering.gathered(param):` (modify=True to change it)"
        )


_recipes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> its Recipe
_UNBUILT = _Unbuilt()


def recipe_of(param: nn.Parameter) -> Recipe | None:
    """The recipe of ``param``; None if its values are in memory, or if it has another owner."""
    if resharded.owner_of(param) is not _UNBUILT:
        return None
    recipe: Recipe = _recipes[param]
    return recipe


def part_of(param: nn.Parameter, first: int, end: int) -> nn.Parameter:
    """Rows [first, end) of ``param`` as a parameter: a view of its memory, or without memory if it has none either."""
    recipe = recipe_of(param)
    if recipe is None:
        # Not of detach(): its views share one version counter, so a change of a part would look like one of all.
        return nn.Parameter(param.data[first:end], requires_grad=param.requires_grad)
    whole = recipe.slice
    rows = replace(
        whole, shape=(end - first, *whole.shape[1:]), offset=whole.offset + first * whole.stride[0]
    )
    absent = torch.zeros((), dtype=param.dtype, device="cpu").expand(rows.shape)
    part = nn.Parameter(absent, requires_grad=param.requires_grad)
    _recipes[part] = Recipe(recipe.tape, rows)
    _hide(part)
    resharded.adopt([part], _UNBUILT)
    return part


def forget(params: Iterable[nn.Parameter]) -> None:
    """Drop the recipes of ``params``, and what their tapes keep of the values that were computed last."""
    for param in params:
        recipe: Recipe | None = _recipes.pop(param, None)
        if recipe is not None:
            recipe.tape.drop_replayed()


def hide(tape: Tape) -> None:
    """Free the memory of the parameters on ``tape``, which has ended, and keep their recipes."""
    slices = {param: slice_ for param in tape.params if (slice_ := tape.slice_of(param)) is not None}
    for param, slice_ in slices.items():
        _recipes[param] = Recipe(tape, slice_)
        _hide(param)
    resharded.adopt(slices, _UNBUILT)
    tape.finish()


def _hide(param: nn.Parameter) -> None:
    """Free the memory of ``param``, which becomes a resharded parameter."""
    value = torch.nan if param.is_floating_point() else 0
    absent = torch.full((), value, dtype=param.dtype, device="cpu")
    resharded.set_data(param, absent.expand(param.shape))
    param.__class__ = resharded.resharded_form(resharded.plain_form(type(param)))


def _in_state_dict() -> bool:
    """Whether a module's ``state_dict`` is running. Torch installs no hook there that a new module would have."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_saving = frame.f_code.co_name in ("state_dict", "_save_to_state_dict")
        if is_saving and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def check_apart(model: nn.Module) -> None:
    """Raise ConfigError if two parameters share memory: each gets its own memory, and they would differ later."""
    ranges: dict[object, list[tuple[int, int, str]]] = {}
    for name, param in model.named_parameters():
        if not param.numel() or param.is_meta or param.layout is not torch.strided:
            continue
        recipe = recipe_of(param)
        if recipe is not None:
            memory: object = recipe.slice.cell
            span = recipe.slice.span
        else:
            last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            memory = param.device
            span = range(param.data_ptr(), param.data_ptr() + (last + 1) * param.element_size())
        ranges.setdefault(memory, []).append((span.start, span.stop, name))
    for spans in ranges.values():
        end, holder = 0, ""
        for begin, stop, name in sorted(spans):
            if begin < end:
                raise ConfigError(
                    f"{holder!r} and {name!r} are two parameters that share memory, and would be separate after"
                    " initialize; tie them by giving both modules the same nn.Parameter"
                )
            end, holder = stop, name
