"""Module and gradient hooks, which turn calls of torch into events. The policy is in schedule.py.

``PassEvents`` is the listener: the pass schedule. Forward hooks are on the entry modules of each group, and on every
module outside of the blocks. So whatever part of the model is called, the schedule knows that a forward runs. The
pre-backward event of a group is the first gradient that reaches an output of one of its entries. ``always_call`` makes
the post-forward event occur also if forward raised, or if activation checkpointing stopped a recomputation early. The
hook then gets no output.

A copied or pickled module keeps its hooks; on the copy they do nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from tiering.errors import EngineStateError
from zero3.device.storages import can_close
from zero3.params.compilation import Around, called_by_compiled_code, eager, is_compiled
from zero3.params.grouping import computes_backward
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes.gradient_parts import TiedParameters, tied_parameters
from zero3.passes.pass_state import next_node


class PassEvents(Protocol):
    """The events of a pass, in the order in which they happen. See PassSchedule for each of them."""

    @property
    def takes_parts(self) -> bool: ...
    def begin_forward(self, training: bool, *, whole: bool) -> None: ...
    def unshard_early(self, group: ParamGroup) -> None: ...
    def end_forward(self, *, raised: bool) -> None: ...
    def begin_backward(self) -> None: ...
    def pre_forward(self, group: ParamGroup) -> None: ...
    def post_forward(self, group: ParamGroup, *, raised: bool) -> None: ...
    def forward_nodes(self) -> range: ...
    def pre_backward(self, group: ParamGroup, nodes: range) -> None: ...
    def gradient(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None: ...
    def gradient_part(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None: ...
    def end_of_backward(self) -> None: ...


class Removable(Protocol):
    """One hook or several."""

    def remove(self) -> None: ...


def install(model: nn.Module, groups: Iterable[ParamGroup], events: PassEvents) -> list[Removable]:
    """Report the events of ``groups`` of ``model`` to ``events``. The handles remove the hooks."""
    groups = list(groups)
    moving = frozenset(each.storage_key for group in groups for each in (group, *group.slices) if each.moves)
    on_params: list[Removable] = []
    hooked: dict[nn.Module, _Hooked] = {}

    def add(module: nn.Module, before: _Before, after: OurHook) -> None:
        hooked.setdefault(module, _Hooked(module)).add(before, after)

    for group in groups:
        for entry in group.entries:
            opening = _BeforeGroup(events, group)
            add(entry, opening, _AfterGroup(events, opening, moving, computes_backward(entry)))
        for piece, param in zip(group.layout.pieces, group.params, strict=True):
            if piece.trainable:
                on_params.append(param.register_post_accumulate_grad_hook(_accumulated(events, group, piece)))
    for module, tied in tied_parameters(model, groups, events):
        beginning = _BeforeTied()
        add(module, beginning, _AfterTied(beginning, tied))
    # After the hooks of groups, because the pair that is added last is the outermost one. torch.compile breaks its
    # graph at hooks: so in a compiled model every module gets them, and graphs are the same for every placement.
    everywhere = bool(moving) or any(is_compiled(module) for module in model.modules())
    for module in _outside_of_blocks(model, groups) if everywhere else [model]:
        before: _BeforeForward = (
            _BeforeModel(model, groups, events, hooked.values())
            if module is model
            else _BeforeForward(events, _inspected_groups(module, groups))
        )
        add(module, before, _AfterForward(events, before, moving))
    for group in groups:
        if group.slices:
            # The forward that borrows experts, and ends their use.
            assert group.routing is not None
            borrowing = _BeforeForward(events, [])
            add(
                model.get_submodule(group.routing.container),
                borrowing,
                _AfterForward(events, borrowing, moving),
            )
    return [*on_params, *hooked.values()]


def _outside_of_blocks(model: nn.Module, groups: Iterable[ParamGroup]) -> Iterator[nn.Module]:
    """``model`` and its modules, down to the entries that enclose no entry of another group."""
    entries = {entry for group in groups for entry in group.entries}
    queue = [model]
    visited = set()
    while queue:
        module = queue.pop(0)
        if module in visited:
            continue
        visited.add(module)
        encloses = any(inner in entries for inner in module.modules() if inner is not module)
        if module is model or module not in entries or encloses:
            yield module
            queue.extend(module.children())


def _enclosing_groups(model: nn.Module, groups: Iterable[ParamGroup]) -> dict[str, nn.Module]:
    """By name: ``model``, and the modules that contain entries of groups and are no entries themselves."""
    entries = {entry for group in groups for entry in group.entries}
    enclosing = {"": model}
    for name, module in model.named_modules():
        if module not in entries and any(inner in entries for inner in module.modules()):
            enclosing[name] = module
    return enclosing


def _inspected_groups(module: nn.Module, groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """The groups of the first layer of a TransformerEncoder: torch inspects their parameters before it calls the layer.

    Torch takes its fast path of evaluation if they are plain parameters. The choice must not depend on placement.
    """
    if not isinstance(module, nn.TransformerEncoder):
        return []
    first_layer = {id(param) for param in module.layers[0].parameters()}
    return [
        group for group in groups if group.moves and any(id(param) in first_layer for param in group.params)
    ]


def watch_backward(outputs: Any, on_first_gradient: Callable[[], None]) -> None:
    """Call ``on_first_gradient`` once per backward pass, when a gradient first reaches a tensor in ``outputs``."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors and torch.is_grad_enabled() and not in_transform():
        # Runs on the thread of autograd, before the first node of the module: early enough to fetch what its nodes
        # read.
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: on_first_gradient(), mode="any")


def with_bytes_of_its_own(output: Any, moving: frozenset[int], *, whole: bool = False) -> Any:
    """``output``, with copies in place of views of parameters that move: their bytes are freed when the forward ends.

    A parameter itself is returned as it is, because a module that uses it unshards it. If the ``whole`` model returns a
    parameter, it is copied, too: no module runs any more that could unshard it.
    """
    if not moving:
        return output
    leaves, structure = tree_flatten(output)
    views = [
        isinstance(leaf, Tensor)
        and (whole or not isinstance(leaf, nn.Parameter))
        and _is_view_of(leaf, moving)
        for leaf in leaves
    ]
    if not any(views):
        return output
    return tree_unflatten(
        [leaf.clone() if view else leaf for leaf, view in zip(leaves, views, strict=True)], structure
    )


def _is_view_of(tensor: Tensor, storages: frozenset[int]) -> bool:
    try:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages
    except (NotImplementedError, RuntimeError):  # inside a function transform tensors have no storage
        return False


def call_at_end_of_backward(callback: Callable[[], None]) -> Callable[[], object | None]:
    """Run ``callback`` when the backward pass that is running now has ended.

    The returned function gives None as soon as that pass is over, also if an exception has ended it.
    """
    # Only autograd refers to this object, and no frame that an exception's traceback keeps: it is freed with the pass.
    at_end = partial(callback)
    # Autograd calls it after the last node, on the stream on which the program computed when it called backward. By
    # then that stream waits for those on which gradients were accumulated, so kernels that the callback queues see all
    # of them.
    torch.autograd.Variable._execution_engine.queue_callback(at_end)
    return weakref.ref(at_end)


def in_transform() -> bool:
    """Whether a differentiating transform of torch.func is active. It allows no hooks for saved tensors.

    A model that is called with copies of its parameters needs no hooks. Other tensors that it saves from a group cannot
    be read after the group is resharded, where storages can be closed.
    """
    return can_close() and torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def check_transform(group: ParamGroup) -> None:
    """EngineStateError in a transform that would differentiate through parameters of ``group``, if the group moves."""
    if group.moves and in_transform():
        raise EngineStateError(
            f"torch.func differentiates through group {group.name!r}, whose parameters are offloaded, and allows no"
            " hooks that would unshard them. Call the model with copies of its parameters:"
            " torch.func.functional_call(model, copies, args), with copies = engine.state_dict()"
        )


def explain_transform(error: BaseException) -> None:
    """Add a note to torch's error about a differentiating transform inside of a forward."""
    if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
        error.add_note(
            "Offloaded parameters, and a tiering.activations other than 'device', need hooks for saved tensors while"
            " the model's forward runs. Use torch.autograd.grad inside of it, or keep parameters and activations on the"
            " device"
        )


class OurHook:
    """A hook of the engine on the user's module. It does nothing on a copy of that module, and is never compiled."""

    @eager
    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_operation

    def __reduce__(self) -> Any:
        return _load_no_operation, ()


def _load_no_operation() -> Callable[..., None]:
    return no_operation


def no_operation(*args: Any, **kwargs: Any) -> None:
    """Replaces a hook of the engine when its module is copied or pickled."""


class _Before(OurHook):
    """A hook before a call, which pairs with a hook after it.

    Torch calls the hook after the call also if this hook did not run, or raised. So each call that has begun is noted
    with its thread: threads and recursive calls may overlap.
    """

    def __init__(self) -> None:
        # Several threads use it without a lock: each operation of the list is one call, which the GIL does not divide.
        self._running: list[int] = []  # thread of each call that has begun

    def begin_call(self) -> None:
        """Note a call whose begin event has succeeded. A call whose begin event raised gets no end event."""
        self._running.append(threading.get_ident())

    def end_call(self) -> bool:
        """A call of this thread is over. Returns False if its beginning was not noted."""
        thread = threading.get_ident()
        if thread not in self._running:
            return False
        self._running.remove(thread)
        return True


class _BeforeForward(_Before):
    """``inspected``: groups whose parameters must show their bytes, in evaluation, before they are used."""

    whole = False

    def __init__(self, events: PassEvents, inspected: list[ParamGroup]) -> None:
        super().__init__()
        self.events = events
        self.inspected = inspected

    def run(self, module: nn.Module, args: Any) -> None:
        self.events.begin_forward(torch.is_grad_enabled(), whole=self.whole)
        # Before anything else that may raise: the hook after the call then ends the forward.
        self.begin_call()
        for group in self.inspected:
            if not group.entries[0].training:
                self.events.unshard_early(group)


class _BeforeModel(_BeforeForward):
    """Before the whole model is called: follow modules of ``hooked`` that were compiled since the last call."""

    whole = True

    def __init__(
        self, model: nn.Module, groups: list[ParamGroup], events: PassEvents, hooked: Iterable[_Hooked]
    ) -> None:
        super().__init__(events, _inspected_groups(model, groups))
        self.hooked = hooked
        self.enclosing = _enclosing_groups(model, groups)

    def run(self, module: nn.Module, args: Any) -> None:
        compiled = next((name for name, inner in self.enclosing.items() if is_compiled(inner)), None)
        if compiled is not None or called_by_compiled_code():
            raise EngineStateError(
                f"{repr(compiled) if compiled else 'the whole model'} runs in code that torch.compile has compiled: its"
                " graph would break at every module whose parameters move, differently for each placement; compile the"
                " blocks instead, for example with `for block in model.layers: block.compile()`"
            )
        # Here, and not at each block: no part of the model runs now, so no hook is moved between its two halves.
        for hooked in self.hooked:
            hooked.follow_compile()
        super().run(module, args)


class _AfterForward(OurHook):
    def __init__(self, events: PassEvents, before: _BeforeForward, moving: frozenset[int]) -> None:
        self.events = events
        self.before = before
        self.moving = moving

    def run(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.before.end_call():
            return None
        # Before end_forward: it frees the bytes from which views in the output are copied.
        output = with_bytes_of_its_own(output, self.moving, whole=self.before.whole)
        if self.before.whole:
            watch_backward(output, self.events.begin_backward)
        self.events.end_forward(raised=output is None)
        return output


class _BeforeGroup(_Before):
    def __init__(self, events: PassEvents, group: ParamGroup) -> None:
        super().__init__()
        self.events = events
        self.group = group

    def run(self, module: nn.Module, args: Any) -> None:
        if in_transform() and not {id(param) for param in self.group.params}.isdisjoint(
            id(param)
            # functional_call has put copies in place of the parameters: those are allowed.
            for param in module.parameters()
        ):
            check_transform(self.group)
        self.events.pre_forward(self.group)
        self.begin_call()


class _AfterGroup(OurHook):
    def __init__(
        self, events: PassEvents, before: _BeforeGroup, moving: frozenset[int], fetches_in_backward: bool
    ) -> None:
        self.events = events
        self.before = before
        self.moving = moving
        # A module without backward may have an output that requires a gradient all the same: a hook of peft sets that
        # for checkpoints of activations.
        self.fetches_in_backward = fetches_in_backward

    def run(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.before.end_call():
            return None
        group = self.before.group
        # Before post_forward, which frees the bytes, and removes the forward whose nodes are needed here.
        output = with_bytes_of_its_own(output, self.moving)
        nodes = self.events.forward_nodes()
        if self.fetches_in_backward:
            watch_backward(output, lambda: self.events.pre_backward(group, nodes))
        self.events.post_forward(group, raised=output is None)
        return output


class _BeforeTied(_Before):
    """Before a module with tied parameters is called: notes the first autograd node that the call makes."""

    def __init__(self) -> None:
        super().__init__()
        # As ``_running``, several threads use it without a lock.
        self._first: list[tuple[int, int]] = []  # for each running call: its thread and first node

    def run(self, module: nn.Module, args: Any) -> None:
        self._first.append((threading.get_ident(), next_node()))

    def nodes(self) -> range:
        """The nodes of the innermost call in this thread, which is over. Empty if its beginning was not noted."""
        thread = threading.get_ident()
        for position in reversed(range(len(self._first))):
            if self._first[position][0] == thread:
                return range(self._first.pop(position)[1], next_node())
        return range(0)


class _AfterTied(OurHook):
    def __init__(self, before: _BeforeTied, tied: TiedParameters) -> None:
        self.before = before
        self.tied = tied

    def run(self, module: nn.Module, args: Any, output: Any) -> None:
        nodes = self.before.nodes()
        if output is not None:
            self.tied.watch(output, nodes)


class _Hooked:
    """A module with pairs of hooks: torch's hooks, or functions around its call once it was compiled in place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._pairs: list[tuple[_Before, OurHook]] = []
        self._handles: list[RemovableHandle] = []
        self._around: Around | None = None

    def add(self, before: _Before, after: OurHook) -> None:
        """Add a pair around the existing pairs."""
        self._pairs.append((before, after))
        self._register(before, after)

    def follow_compile(self) -> None:
        """Move the hooks if ``module.compile()`` was called since the last time."""
        call = self.module._compiled_call_impl
        if call is self._around:
            return
        # First: the hooks must not run twice, as torch's and around the compiled call.
        self._unregister()
        if call is None:
            self._around = None
            for before, after in self._pairs:
                self._register(before, after)
        else:
            befores, afters = zip(*self._pairs, strict=True)
            self._around = Around(
                self.module, call, [hook.run for hook in reversed(befores)], [hook.run for hook in afters]
            )
            self.module._compiled_call_impl = self._around

    def remove(self) -> None:
        """Remove all hooks from the module."""
        self._unregister()
        if self._around is not None and self.module._compiled_call_impl is self._around:
            self.module._compiled_call_impl = self._around.call

    def _register(self, before: _Before, after: OurHook) -> None:
        # Pre-forward hooks are prepended and forward hooks appended, so the last pair is the outermost one.
        self._handles.append(self.module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self.module.register_forward_hook(after, always_call=True))

    def _unregister(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _accumulated(events: PassEvents, group: ParamGroup, piece: Piece) -> Callable[[Tensor], None]:
    # Weak references: Python's garbage collector cannot traverse these hooks, so an object that they hold would keep
    # the parameter, and the parameter the hook, for ever.
    listener, group_ref = weakref.ref(events), weakref.ref(group)

    def gradient(param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        events, group = listener(), group_ref()
        if events is not None and group is not None:
            events.gradient(group, piece, param)

    return gradient
