"""A StepBatch over tensors, which is checked and built once, and reused while its tensors do not change.

A step of ten thousand small tensors is mostly bookkeeping. Little changes between two steps: addresses of gradients,
step counts, a learning rate. So a batch stores attributes of every tensor when it is built (its *picture*: addresses,
dtypes, shapes, strides, versions), and compares them at each step, attribute by attribute in C loops. If only addresses
of gradients differ, the batch runs without a rebuild. Otherwise the rows that differ are checked and prepared again,
and the others are added unchanged.

All tensors are checked, and all rules created, before the first write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from optim_cpu.dtypes import DTYPES
from optim_cpu.formats import STATE_FORMATS
from optim_cpu.kernels import Rule, StateFormat, StepBatch
from optim_cpu.masters import HALVES, fit_master, master_keys
from optim_cpu.memory_order import in_order_of, is_dense, same_order


@dataclass(frozen=True)
class Form:
    """The form of a param group's state: keys of the arrays in the kernels' order, format, and initial value."""

    arrays: tuple[str, ...]
    format: StateFormat
    split: bool
    initial: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        return STATE_FORMATS[self.format].dtype


@dataclass(eq=False, slots=True)
class Member:
    """A parameter with a gradient, and its position in the optimizer."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: int
    form: Form
    first_index: int
    """Number of elements of the parameters before it, on which stochastic rounding depends."""
    describe: Callable[[], str]


@dataclass(eq=False, slots=True)
class _Row:
    """A parameter ready to be stepped."""

    properties: tuple[Any, ...]
    version: int
    keys: tuple[str, ...]
    arrays: tuple[Tensor, ...]
    # The parameter's memory. It and the arrays are referenced, so that an equal address means the same memory.
    memory: Tensor
    # Whether the gradient has other strides than the parameter.
    copies_grad: bool


class TensorBatch:
    """The rows of one optimizer, and the batch over those that had a gradient at the last step."""

    def __init__(self) -> None:
        self._rows: dict[Tensor, _Row] = {}
        self._batch = StepBatch()
        self._picture: list[list[Any]] | None = None  # None: to be built
        self._params: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        self._halves: list[Tensor] = []
        self._dicts: list[dict[str, Any]] = []  # with _keys: where each array of state is
        self._keys: list[str] = []
        self._counted: list[dict[str, Any]] = []  # states with a step count, all of them elements of _steps
        self._steps = torch.zeros(0)
        self._steps_version = 0
        self._counts: list[tuple[int, int]] = []  # rule -> param group and steps taken
        self._addresses: list[int] = []  # of the gradients, as the segments have them
        self._strided: list[int] = []  # gradients that are not contiguous
        self._strided_params: list[Tensor] = []
        self._copied: list[int] = []  # those not in their parameter's order, which are copied in each step

    def forget(self) -> None:
        """Make the next step check all tensors, like the first step."""
        self._rows.clear()
        self._picture = None

    def holds(self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any] | None]) -> bool:
        """Whether ``run`` may be called without ``build``: parameters, state and attributes are unchanged."""
        if self._picture is None or len(params) != len(self._params):
            return False
        if not all(map(is_, params, self._params)) or not all(map(is_, states, self._states)):
            return False
        try:
            return self._take_picture(grads) == self._picture and self._steps._version == self._steps_version
        except (RuntimeError, KeyError, TypeError):
            # A sparse gradient or a removed key: build() raises the error.
            return False

    def build(self, members: Sequence[Member], make_rule: Callable[[int, int], Rule]) -> None:
        """Check every tensor that was not seen like this before, then add all of them to a new batch.

        ``make_rule(group, step)`` is called once for each pair, with the number of the next step. Raises
        TypeError or ValueError naming the parameter, before anything was written.
        """
        self._keep_versions()
        self._picture = None
        stale = [m for m in members if not self._is_fresh(m)]
        for member in stale:
            _check(member)
        if stale:
            _check_apart(members)
        for member in stale:
            self._rows[member.param] = _prepared(member)
        self._params = [m.param for m in members]
        self._states = [m.state for m in members]
        self._fill(members, make_rule)
        self._watch(members)

    def groups_and_steps(self) -> list[tuple[int, int]]:
        """For each rule of the batch, in order: its param group, and the number of the step that comes next."""
        return [(group, count + 1) for group, count in self._counts]

    def run(self, grads: list[Tensor], rules: Sequence[Rule]) -> None:
        """Take one step. ``rules`` come in ``groups_and_steps``'s order."""
        copies = self._point_at(grads)
        for number, rule in enumerate(rules):
            self._batch.set_rule(number, rule)
        try:
            self._batch.run()
        finally:
            # A signal handler runs only after the kernels have returned: the step is complete even if it raises.
            self._steps.add_(1)
            self._steps_version = self._steps._version
            self._counts = [(group, count + 1) for group, count in self._counts]
            torch.autograd.graph.increment_version(self._params)
            assert self._picture is not None
            self._picture[-1] = list(map(_VERSION, self._halves))
            copies.clear()

    def _point_at(self, grads: list[Tensor]) -> list[Tensor]:
        """Set the gradients of the segments; returns copies that must live until the end of the run."""
        copies = []
        if self._copied:
            grads = list(grads)
            for i in self._copied:
                grads[i] = in_order_of(grads[i], self._params[i], grads[i].dtype)
                copies.append(grads[i])
        addresses = list(map(Tensor.data_ptr, grads))
        for i, (address, previous) in enumerate(zip(addresses, self._addresses, strict=True)):
            if address != previous:
                self._batch.set_grad(i, address)
                self._addresses[i] = address
        return copies

    def _is_fresh(self, member: Member) -> bool:
        row = self._rows.get(member.param)
        try:
            return (
                row is not None
                and row.properties == _properties_of(member, row.keys)
                and (member.param.dtype not in HALVES or row.version == member.param._version)
            )
        except (RuntimeError, KeyError, TypeError):
            return False

    def _fill(self, members: Sequence[Member], make_rule: Callable[[int, int], Rule]) -> None:
        """Add all rows to the batch, and put their step counts into one tensor; each state gets its element."""
        self._batch.clear()
        self._counts = []
        numbers: dict[tuple[int, int], int] = {}
        counts = []
        for member in members:
            count = int(member.state["step"]) if member.form.arrays else 0
            counts.append(count)
            if (member.group, count) not in numbers:
                rule = make_rule(member.group, count + 1)
                numbers[member.group, count] = self._batch.add_rule(rule)
                self._counts.append((member.group, count))
            self._add(member, numbers[member.group, count])
        self._addresses = [m.grad.data_ptr() for m in members]
        self._copied = [i for i, m in enumerate(members) if self._rows[m.param].copies_grad]
        self._steps = torch.tensor(counts, dtype=torch.float32, device="cpu")
        for member, step in zip(members, self._steps.unbind(), strict=True):
            if member.form.arrays:
                member.state["step"] = step

    def _add(self, member: Member, rule: int) -> None:
        param, form, row = member.param, member.form, self._rows[member.param]
        addresses = [array.data_ptr() for array in row.arrays]
        state = tuple(addresses[: len(form.arrays)])
        last = addresses[-1] if addresses else 0
        whole = row.keys[-1:] == ("master",)
        self._batch.add(
            param.numel(),
            rule,
            param=last if whole else param.data_ptr(),
            remainder=last if row.keys[-1:] == ("remainder",) else 0,
            out=param.data_ptr() if whole else 0,
            out_dtype=DTYPES[param.dtype],
            state=state,
            state_format=form.format,
            grad=member.grad.data_ptr(),
            grad_dtype=DTYPES[member.grad.dtype],
            first_index=member.first_index,
        )

    def _watch(self, members: Sequence[Member]) -> None:
        """Store the attributes of the tensors that the batch was built from."""
        slots = [(key, m.state) for m in members for key in self._rows[m.param].keys]
        # Arrays of one kind were allocated one after the other: this order has far fewer cache misses.
        slots.sort(key=itemgetter(0))
        self._keys = [key for key, _ in slots]
        self._dicts = [state for _, state in slots]
        self._counted = [m.state for m in members if m.form.arrays]
        self._halves = [m.param for m in members if m.param.dtype in HALVES]
        self._strided = [i for i, m in enumerate(members) if not m.grad.is_contiguous()]
        self._strided_params = [m.param for m in members if not m.param.is_contiguous()]
        self._picture = self._take_picture([m.grad for m in members])
        self._steps_version = self._steps._version

    def _take_picture(self, grads: list[Tensor]) -> list[list[Any]]:
        return [
            list(map(Tensor.data_ptr, self._params)),
            list(map(_DTYPE, self._params)),
            # Cheaper than strides, which are compared only for tensors that are not contiguous.
            list(map(Tensor.is_contiguous, self._params)),
            list(map(Tensor.stride, self._strided_params)),
            list(map(_DTYPE, grads)),
            list(map(Tensor.numel, grads)),
            list(map(Tensor.is_contiguous, grads)),
            [grads[i].stride() for i in self._strided],
            list(map(Tensor.data_ptr, map(getitem, self._dicts, self._keys))),
            list(map(id, map(getitem, self._counted, repeat("step")))),
            list(map(_VERSION, self._halves)),
        ]

    def _keep_versions(self) -> None:
        if self._picture is not None:
            for param, version in zip(self._halves, self._picture[-1], strict=True):
                self._rows[param].version = version


_DTYPE, _VERSION = attrgetter("dtype"), attrgetter("_version")


def _properties_of(member: Member, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """The attributes of a member that must be unchanged for its row to be valid."""
    param, grad = member.param, member.grad
    tensors = (param, *(member.state[key] for key in keys))
    return (
        member.form,
        member.first_index,
        param.dtype,
        param.shape,
        param.stride(),
        grad.dtype,
        grad.shape,
        grad.stride(),
        *(tensor.data_ptr() for tensor in tensors),
    )


def _prepared(member: Member) -> _Row:
    """A row for the member, after its state is created or converted to the member's form."""
    param, state, form = member.param, member.state, member.form
    for key in ("master", "remainder"):
        if state.get(key) is not None:
            dtype = torch.float32 if key == "master" else torch.int16
            state[key] = in_order_of(state[key], param, dtype)
    fit_master(param, state, split=form.split)
    start_state(param, state, form)
    keys = form.arrays + master_keys(param, form.split)
    arrays = tuple(state[key] for key in keys)
    copies_grad = not same_order(member.grad, param)
    return _Row(_properties_of(member, keys), param._version, keys, arrays, param.detach(), copies_grad)


def start_state(param: Tensor, state: dict[str, Any], form: Form) -> None:
    """Create the arrays and the step count of ``form`` in ``state``; existing arrays are converted."""
    if not form.arrays:
        return
    if any(state.get(key) is None for key in form.arrays):
        state["step"] = torch.zeros((), device="cpu")
        for key in form.arrays:
            state[key] = torch.full_like(param, form.initial, dtype=form.dtype, requires_grad=False)
    for key in form.arrays:
        state[key] = in_order_of(state[key], param, form.dtype)


def _check(member: Member) -> None:
    param, grad, state = member.param, member.grad, member.state
    if param.device.type != "cpu":
        raise ValueError(
            f"{member.describe()} is on {param.device}; these optimizers step memory of the CPU: move the model"
            " there, or use torch.optim"
        )
    if param.dtype not in DTYPES:
        raise TypeError(f"{member.describe()} is {param.dtype}; it must be float32, bfloat16 or float16")
    if param.layout is not torch.strided or not _has_memory(param):
        raise TypeError(
            f"{member.describe()} is a {type(param).__name__} without plain memory of its own; give the optimizer the "
            "tensor inside, such as a DTensor's local one"
        )
    if param.is_inference():
        raise ValueError(
            f"{member.describe()} was made under torch.inference_mode and cannot be trained; clone it outside"
        )
    if not is_dense(param):
        raise ValueError(
            f"{member.describe()} has strides {tuple(param.stride())}, which do not cover one block of memory; make"
            " it from a .contiguous() tensor"
        )
    if member.form.split and param.dtype is torch.float16:
        raise TypeError(
            f"{member.describe()} is float16, whose master cannot be split; use state_format 'fp32' or 'bf16' in its"
            " group, or bfloat16"
        )
    _check_grad(member, grad)
    check_state(param, state, member.form, member.describe)


def _check_grad(member: Member, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {member.describe()} is sparse ({grad.layout}); use dense gradients (torch.nn.Embedding("
            "sparse=False)), or torch.optim.SparseAdam, SGD or Adagrad for this parameter"
        )
    if grad.dtype not in DTYPES:
        raise TypeError(
            f"the gradient of {member.describe()} is {grad.dtype}; it must be float32, bfloat16 or float16"
        )
    if grad.device.type != "cpu" or grad.shape != member.param.shape or not _has_memory(grad):
        raise ValueError(
            f"the gradient of {member.describe()} is on {grad.device} and of shape {tuple(grad.shape)}; it must be on"
            " the CPU and of its parameter's shape"
        )


def check_state(param: Tensor, state: dict[str, Any], form: Form, describe: Callable[[], str]) -> None:
    """Raise ValueError unless ``state`` is empty or whole."""
    present = [key for key in form.arrays if state.get(key) is not None]
    missing = [key for key in (*form.arrays, "step") if state.get(key) is None]
    if present and missing:
        raise ValueError(
            f"the state of {describe()} has {present[0]!r} but no {missing[0]!r}; load a whole state, or clear it"
        )
    for key in (*present, "master", "remainder"):
        value = state.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.shape != param.shape):
            actual = (
                f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise ValueError(f"state {key!r} of {describe()} is {actual}; it must have the parameter's shape")


def _check_apart(members: Sequence[Member]) -> None:
    """Check that no two parameters share memory, because threads step them at the same time."""
    spans = sorted(
        (m.param.data_ptr(), m.param.numel() * m.param.element_size(), i)
        for i, m in enumerate(members)
        if m.param.numel()
    )
    for (start, nbytes, i), (following, _, j) in pairwise(spans):
        if start + nbytes <= following:
            continue
        if members[i].param is members[j].param:
            raise ValueError(f"{members[j].describe()} is listed twice; list each parameter once")
        raise ValueError(
            f"{members[i].describe()} and {members[j].describe()} share memory; to tie weights, use one Parameter in"
            " both modules"
        )


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False
