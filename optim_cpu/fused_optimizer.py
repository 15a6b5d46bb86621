"""Base class of the optimizers on CPU tensors: options, state, state_dict, and one fused pass for all parameters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.kernels import Rule, StateFormat
from optim_cpu.rules import UpdateRule
from optim_cpu.tensor_batch import Form, Member, TensorBatch, check_state

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

Derived = TypeVar("Derived")

STATE_FORMATS = ("fp32", "bf16", "split", "split+bf16")

REFUSED = {
    "amsgrad": "there is no kernel for it; use torch.optim's",
    "capturable": "CPU memory is not captured in graphs; leave it False",
    "differentiable": "the fused pass has no backward; use torch.optim's with differentiable=True",
}


class FusedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over CPU tensors that steps all its parameters in one run of the kernels.

    Arguments have the names, order and defaults of torch.optim; ``lr`` may be a one-element tensor. ``foreach`` and
    ``fused`` are accepted for compatibility with code and checkpoints, and have no effect. These options are not in
    torch; each param group may set them:

    ``state_format`` is the format of the state between steps.

        fp32          moments float32; a 16-bit parameter has a float32 ``master``
        bf16          moments bfloat16; a 16-bit parameter has a float32 ``master``
        split         moments float32; a bfloat16 parameter has an int16 ``remainder``: both are its float32 master
        split+bf16    moments bfloat16; a bfloat16 parameter has an int16 ``remainder``

    A float32 parameter is its own master. Each 16-bit parameter has a master, because steps are smaller than its last
    place and would be lost. After a change of a group's format, or a load of state in another one, the next step
    converts the state.

    ``stochastic_rounding`` affects bfloat16 moments only. It is on by default, because an average with a decay close
    to 1 does not change without it: with beta2 = 0.999, exp_avg_sq moves by a thousandth of its distance to the squared
    gradient, and half a last place of bfloat16 is two thousandths of it. Its random bits depend on ``seed`` (0 to
    2^64 - 1), the step and the element's index among all parameters, so that a run is reproducible.

    Parameters and gradients are float32, bfloat16 or float16, and may differ in dtype. Complex, sparse and other
    tensors raise an error with their name, before any memory is written. Elements may have any order that fills one
    block of memory (contiguous, channels_last, transposed); a gradient in another order is copied for the step.
    Parameters without a gradient are skipped, and step counts are per parameter.

    A 16-bit parameter that is edited between steps (in place, by ``load_state_dict`` of its model, by an assignment to
    ``.data``) keeps its new value, and its master follows. Writes that torch does not count (through ``.data``, numpy
    or another library) are not detected: call ``follow_parameters`` after one. The previous memory of ``.data`` stays
    allocated until the next step. A 16-bit parameter that becomes float32 starts from its rounded value, and its master
    is dropped; to continue from the master, assign it: ``param.data = optimizer.state[param]["master"]``.

    ``load_state_dict`` copies the state, keeps every dtype, and accepts state of torch.optim's class of the same name;
    options that it lacks keep their values. torch's class loads the state of this one if parameters are float32.

    Two threads must not step one optimizer at the same time.
    """

    # Set by each subclass.
    update_rule: ClassVar[UpdateRule]

    _batch: TensorBatch
    # All parameters, as of the last step.
    _everyone: list[Tensor]
    # Form and length of each group when the batch was built.
    _layout: list[tuple[Form, int]]

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        # Raises for an unknown TIERING_ISA here, instead of in a step.
        kernels.instruction_set()
        self._reset()
        super().__init__(params, defaults)

    def _form(self, group: dict[str, Any]) -> Form:
        """The form of the group's state. Raises ValueError, which names an invalid option."""
        return form_of(group, self.update_rule.state_names(group), self.update_rule.initial(group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options, as in torch. Raises ValueError for an invalid option."""
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group}, len(self.param_groups))
        _torch_method("add_param_group")(self, param_group)

    # torch declares two overloads; this signature covers both.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient.

        Calls ``closure`` first, with autograd on, and returns its result. Raises TypeError or ValueError, which names
        the parameter or group, before any parameter is stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params, grads = self._with_gradients()
        if params:
            self._prepare(params, grads)
            rules = [self._rule_now(group, step) for group, step in self._batch.groups_and_steps()]
            self._batch.run(grads, rules)
        return loss

    def _with_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        params = [param for group in self.param_groups for param in group["params"]]
        if len(params) != len(self._everyone) or not all(map(is_, params, self._everyone)):
            self._everyone = params
            self._batch.forget()
        grads = list(map(attrgetter("grad"), params))
        if any(map(is_, grads, repeat(None))):
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        return params, grads

    def _prepare(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Build the batch, unless the existing one is still valid."""
        layout = [(self._form_now(i), len(group["params"])) for i, group in enumerate(self.param_groups)]
        if layout == self._layout and self._batch.holds(params, grads, list(map(self.state.get, params))):
            return
        self._layout = []
        for number, group in enumerate(self.param_groups):
            self._check_options(group, number)
        self._batch.build(self._members(), self._rule_now)
        self._layout = layout

    def follow_parameters(self) -> None:
        """Make the next step compare all masters with their 16-bit parameters, after writes that torch does not count.

        A step cannot detect a write through ``.data`` or numpy, and a whole master would overwrite it.
        """
        self._batch.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or zero them in place."""
        _torch_method("zero_grad")(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: references to the state, except for step counts, which are copies."""
        exported: dict[str, Any] = _torch_method("state_dict")(self)
        exported["state"] = {
            key: {k: v.clone() if k == "step" else v for k, v in state.items()}
            for key, state in exported["state"].items()
            if state
        }
        return exported

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's, including its options.

        Raises ValueError, which names the entry that does not fit; the optimizer is then unchanged.
        """
        # torch casts loaded tensors to the parameter's dtype, which would round masters and moments. It does not cast
        # other objects, so the hook wraps the tensors. A hook registered here runs after the user's.
        handle = self.register_load_state_dict_pre_hook(_wrap_tensors)
        try:
            _torch_method("load_state_dict")(self, state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state. torch calls it after loading, unpickling and copying."""
        for values in state["state"].values():
            _unwrap_tensors(values)
        defaults = state.get("defaults") or self.defaults
        for number, group in enumerate(state["param_groups"]):
            for name, value in defaults.items():
                group.setdefault(name, value)
            self._check_options(group, number)
            for i, param in enumerate(group["params"]):
                if param in state["state"]:
                    self._check_loaded(
                        param, state["state"][param], group, partial(_describe, group, number, i)
                    )
        self._reset()
        super().__setstate__(state)

    def _check_loaded(
        self, param: Tensor, values: dict[str, Any], group: dict[str, Any], describe: Callable[[], str]
    ) -> None:
        if values.get("max_exp_avg_sq") is not None:
            raise ValueError(
                f"the state of {describe()} has 'max_exp_avg_sq' (amsgrad): {REFUSED['amsgrad']}"
            )
        form = self._form(group)
        check_state(param, values, form, describe)
        foreign = sorted(key for key in values if key not in (*form.arrays, "step", "master", "remainder"))
        if foreign and form.arrays and all(values.get(key) is None for key in form.arrays):
            raise ValueError(
                f"the state of {describe()} has {foreign[0]!r}, but {type(self).__name__} keeps {form.arrays[0]!r};"
                " it was saved by another optimizer"
            )

    def _reset(self) -> None:
        self._batch = TensorBatch()
        self._everyone = []
        self._layout = []

    def _members(self) -> list[Member]:
        """The parameters that have a gradient."""
        starts = accumulate((p.numel() for group in self.param_groups for p in group["params"]), initial=0)
        members = []
        for number, group in enumerate(self.param_groups):
            form = self._form(group)
            for i, param in enumerate(group["params"]):
                start = next(starts)
                if param.grad is None:
                    continue
                state = self.state.setdefault(param, {})
                describe = partial(_describe, group, number, i)
                members.append(Member(param, param.grad, state, number, form, start, describe))
        return members

    def _form_now(self, number: int) -> Form:
        return self._with_group_number(number, self._form, self.param_groups[number])

    def _rule_now(self, number: int, step: int) -> Rule:
        return self._with_group_number(number, self.update_rule.at, self.param_groups[number], step)

    def _check_options(self, group: dict[str, Any], number: int) -> None:
        for name, remedy in REFUSED.items():
            if group.get(name):
                place = f"{type(self).__name__}, param group {number}"
                raise ValueError(f"{place}: {name}={group[name]!r} is not supported: {remedy}")
        self._with_group_number(number, self._form, group)
        self._with_group_number(number, self.update_rule.at, group, 1)

    def _with_group_number(self, number: int, derive: Callable[..., Derived], *arguments: Any) -> Derived:
        """The result of ``derive``; its errors get the number of the param group."""
        try:
            return derive(*arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{type(self).__name__}, param group {number}: {error}") from None


def _torch_method(name: str) -> Callable[..., Any]:
    """The method of ``torch.optim.Optimizer``, without its wrapper if possible.

    The wrapper excludes the method from torch.compile, and imports the compiler for that, which takes a second. It is
    not needed while the compiler is not imported.
    """
    method: Callable[..., Any] = getattr(torch.optim.Optimizer, name)
    return method if "torch._dynamo" in sys.modules else inspect.unwrap(method)


def _describe(group: dict[str, Any], number: int, i: int) -> str:
    name = f"{group['param_names'][i]!r}, " if "param_names" in group else ""
    return f"parameter {i} of param group {number} ({name}shape {tuple(group['params'][i].shape)})"


def form_of(group: dict[str, Any], arrays: tuple[str, ...], initial: float = 0.0) -> Form:
    """The group's form, with the state arrays of its optimizer."""
    name = group["state_format"]
    if name not in STATE_FORMATS:
        raise ValueError(f"state_format must be one of {', '.join(STATE_FORMATS)}, got {name!r}")
    state_format = StateFormat.FP32
    if name.endswith("bf16"):
        state_format = StateFormat.BF16_STOCHASTIC if group["stochastic_rounding"] else StateFormat.BF16
    return Form(arrays, state_format, name.startswith("split"), initial)


class _Wrapped:
    """Wraps a tensor, so that torch's ``load_state_dict`` does not cast it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _wrap_tensors(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    wrapped = {
        key: {k: _Wrapped(v) if isinstance(v, Tensor) else v for k, v in values.items()}
        if isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": wrapped}


def _unwrap_tensors(values: Any) -> None:
    """Replace every wrapped tensor by a copy of it, in place."""
    if isinstance(values, dict):
        for key, value in values.items():
            if isinstance(value, _Wrapped):
                values[key] = value.tensor.detach().clone(memory_format=torch.preserve_format)
