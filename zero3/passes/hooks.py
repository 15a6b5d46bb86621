"""Module and gradient hooks: they turn what torch does into events. No policy lives here.

``Events`` is what listens: the pass schedule. Forward hooks sit on the entry modules of each group, and on every module
outside of the blocks, so that whatever part of the model is called, a forward is known to be running. The pre-backward
event of a group is the first gradient that reaches an output of one of its entries. ``always_call`` makes the
post-forward event come also when forward raised, or when activation checkpointing stopped a recomputation early: then
there is no output.

A copied or pickled module takes its hooks along: there they do nothing.
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
from zero3.device.closed_storage import can_close
from zero3.params.compiled_modules import Around, called_by_compiled_code, is_compiled
from zero3.params.eager import eager
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes.gradient_parts import TiedParameters, tied_parameters


class Events(Protocol):
    """What happens to groups, in the order in which it happens."""

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
    """A hook, or several."""

    def remove(self) -> None: ...


def install(model: nn.Module, groups: Iterable[ParamGroup], events: Events) -> list[Removable]:
    """Hook ``groups`` of ``model`` up to ``events``; the handles remove the hooks."""
    groups = list(groups)
    moving = frozenset(group.storage_key for group in groups if group.moves)
    on_params: list[Removable] = []
    hooked: dict[nn.Module, _Hooked] = {}

    def add(module: nn.Module, before: _Before, after: OurHook) -> None:
        hooked.setdefault(module, _Hooked(module)).add(before, after)

    for group in groups:
        for entry in group.entries:
            opening = _BeforeGroup(events, group)
            add(entry, opening, _AfterGroup(events, opening, moving))
        for piece, param in zip(group.layout.pieces, group.params, strict=True):
            if piece.trainable:
                on_params.append(param.register_post_accumulate_grad_hook(_accumulated(events, group, piece)))
    for module, tied in tied_parameters(model, groups, events):
        beginning = _BeforeTied()
        add(module, beginning, _AfterTied(beginning, tied))
    # After the groups': the hooks of the last pair are the outermost. What is compiled is cut at the hooks in it: then
    # they are the same for every placement.
    everywhere = bool(moving) or any(is_compiled(module) for module in model.modules())
    for module in _outside_of_blocks(model, groups) if everywhere else [model]:
        before: _BeforeForward = (
            _BeforeModel(model, groups, events, hooked.values())
            if module is model
            else _BeforeForward(events, _looked_at(module, groups))
        )
        add(module, before, _AfterForward(events, before, moving))
    return [*on_params, *hooked.values()]


def _outside_of_blocks(model: nn.Module, groups: Iterable[ParamGroup]) -> Iterator[nn.Module]:
    """``model`` and the modules in it, down to the entries that enclose no other group's."""
    entries = {entry for group in groups for entry in group.entries}
    queue = [model]
    seen = set()
    while queue:
        module = queue.pop(0)
        if module in seen:
            continue
        seen.add(module)
        encloses = any(inner in entries for inner in module.modules() if inner is not module)
        if module is model or module not in entries or encloses:
            yield module
            queue.extend(module.children())


def _enclosing_groups(model: nn.Module, groups: Iterable[ParamGroup]) -> dict[str, nn.Module]:
    """``model``, and the modules around blocks that are none themselves, by name."""
    entries = {entry for group in groups for entry in group.entries}
    around = {"": model}
    for name, module in model.named_modules():
        if module not in entries and any(inner in entries for inner in module.modules()):
            around[name] = module
    return around


def _looked_at(module: nn.Module, groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """The groups of an encoder's first layer, which torch looks at before it calls it.

    It takes its fast path of evaluation if their parameters are plain ones, which must not depend on placement.
    """
    if not isinstance(module, nn.TransformerEncoder):
        return []
    asked = {id(param) for param in module.layers[0].parameters()}
    return [group for group in groups if group.moves and any(id(param) in asked for param in group.params)]


def watch_backward(outputs: Any, on_first_gradient: Callable[[], None]) -> None:
    """Call ``on_first_gradient`` once per backward pass, when a gradient first reaches a tensor in ``outputs``."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors and torch.is_grad_enabled() and not in_transform():
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: on_first_gradient(), mode="any")


def with_bytes_of_its_own(output: Any, moving: frozenset[int], *, whole: bool = False) -> Any:
    """``output``, with copies in place of views of parameters that move: their bytes go when the forward ends.

    A parameter itself stays one, since it unshards where it is used; not when the ``whole`` model has returned it, and
    nothing runs any more that it could unshard for.
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

    What is returned gives None as soon as that pass is over, in whatever way.
    """
    at_end = partial(callback)  # autograd's alone: no frame that an exception keeps knows it
    torch.autograd.Variable._execution_engine.queue_callback(at_end)
    return weakref.ref(at_end)


def next_node() -> int:
    """The number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def graph_task() -> int:
    """The number of the backward pass that this thread is inside of, -1 if of none. One inside another has its own."""
    task: int = torch._C._current_graph_task_id()
    return task


def in_autograd() -> bool:
    """Whether this thread is inside autograd's backward (a recomputation under checkpointing is)."""
    return graph_task() != -1


def in_transform() -> bool:
    """Whether this runs in a transform of torch.func that differentiates: it allows no hooks for saved tensors.

    A model that is called with copies of its parameters needs none. Whatever else it saves of a group cannot be read
    when that has gone, if storages are closed then.
    """
    return can_close() and torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def check_transform(group: ParamGroup) -> None:
    """EngineStateError in a transform that would differentiate through parameters of ``group``, which come and go."""
    if group.moves and in_transform():
        raise EngineStateError(
            f"torch.func differentiates through group {group.name!r}, whose parameters are offloaded, and allows no"
            " hooks that would bring them back for that. Call the model with copies of its parameters:"
            " torch.func.functional_call(model, copies, args), with copies = engine.state_dict()"
        )


class OurHook:
    """A hook on the user's module, which means nothing on a copy of that module. Compiled code calls it eagerly."""

    @eager
    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return does_nothing

    def __reduce__(self) -> Any:
        return _what_is_left, ()


def _what_is_left() -> Callable[..., None]:
    return does_nothing


def does_nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook of ours becomes when its module is copied or pickled."""


class _Before(OurHook):
    """A hook that another one answers: torch calls that one also where this one never ran, or raised."""

    def __init__(self) -> None:
        self._running: list[int] = []  # the threads of the calls that it has told of

    def told(self) -> None:
        """A call has begun, and the events know."""
        self._running.append(threading.get_ident())

    def answered(self) -> bool:
        """The call is over; False if its beginning was never told."""
        thread = threading.get_ident()
        if thread not in self._running:
            return False
        self._running.remove(thread)
        return True


class _BeforeForward(_Before):
    """``looked_at``: groups whose parameters must show their bytes in evaluation before they are used."""

    whole = False

    def __init__(self, events: Events, looked_at: list[ParamGroup]) -> None:
        super().__init__()
        self.events = events
        self.looked_at = looked_at

    def run(self, module: nn.Module, args: Any) -> None:
        self.events.begin_forward(torch.is_grad_enabled(), whole=self.whole)
        self.told()
        for group in self.looked_at:
            if not group.entries[0].training:
                self.events.unshard_early(group)


class _BeforeModel(_BeforeForward):
    """Of the whole model, and no part of it runs: settles where the hooks of all ``hooked`` modules are."""

    whole = True

    def __init__(
        self, model: nn.Module, groups: list[ParamGroup], events: Events, hooked: Iterable[_Hooked]
    ) -> None:
        super().__init__(events, _looked_at(model, groups))
        self.hooked = hooked
        self.enclosing = _enclosing_groups(model, groups)

    def run(self, module: nn.Module, args: Any) -> None:
        compiled = next((name for name, each in self.enclosing.items() if is_compiled(each)), None)
        if compiled is not None or called_by_compiled_code():
            raise EngineStateError(
                f"{repr(compiled) if compiled else 'the whole model'} runs in code that torch.compile has compiled: it"
                " would be cut at every module whose parameters move, and differently for each placement; compile the"
                " blocks instead, as by `for block in model.layers: block.compile()`"
            )
        for each in self.hooked:
            each.settle()
        super().run(module, args)


class _AfterForward(OurHook):
    def __init__(self, events: Events, before: _BeforeForward, moving: frozenset[int]) -> None:
        self.events = events
        self.before = before
        self.moving = moving

    def run(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.before.answered():
            return None
        output = with_bytes_of_its_own(output, self.moving, whole=self.before.whole)
        if self.before.whole:
            watch_backward(output, self.events.begin_backward)
        self.events.end_forward(raised=output is None)
        return output


class _BeforeGroup(_Before):
    def __init__(self, events: Events, group: ParamGroup) -> None:
        super().__init__()
        self.events = events
        self.group = group

    def run(self, module: nn.Module, args: Any) -> None:
        if in_transform() and not {id(param) for param in self.group.params}.isdisjoint(
            id(param)
            for param in module.parameters()  # others, if it is called with copies
        ):
            check_transform(self.group)
        self.events.pre_forward(self.group)
        self.told()


class _AfterGroup(OurHook):
    def __init__(self, events: Events, before: _BeforeGroup, moving: frozenset[int]) -> None:
        self.events = events
        self.before = before
        self.moving = moving

    def run(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.before.answered():
            return None
        group = self.before.group
        output = with_bytes_of_its_own(output, self.moving)
        nodes = self.events.forward_nodes()
        watch_backward(output, lambda: self.events.pre_backward(group, nodes))
        self.events.post_forward(group, raised=output is None)
        return output


class _BeforeTied(_Before):
    """Of a module with tied parameters: notes which autograd nodes its call makes."""

    def __init__(self) -> None:
        super().__init__()
        self._first: list[tuple[int, int]] = []  # of the calls that are running: thread, first node

    def run(self, module: nn.Module, args: Any) -> None:
        self._first.append((threading.get_ident(), next_node()))

    def nodes(self) -> range:
        """Those of the innermost call in this thread, which is over; none if its beginning was never told."""
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
    """A module with hooks of ours, in pairs: among torch's, or once it was compiled in place, around its call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._pairs: list[tuple[_Before, OurHook]] = []
        self._handles: list[RemovableHandle] = []
        self._around: Around | None = None

    def add(self, before: _Before, after: OurHook) -> None:
        """Hooks around those that are there."""
        self._pairs.append((before, after))
        self._register(before, after)

    def settle(self) -> None:
        """Follow ``module.compile()``, which may have been called at any time."""
        call = self.module._compiled_call_impl
        if call is self._around:
            return
        self._unregister()
        if call is None:
            self._around = None
            for before, after in self._pairs:
                self._register(before, after)
        else:
            befores, afters = zip(*self._pairs, strict=True)
            self._around = Around(
                self.module, call, [each.run for each in reversed(befores)], [each.run for each in afters]
            )
            self.module._compiled_call_impl = self._around

    def remove(self) -> None:
        """The module is as it was."""
        self._unregister()
        if self._around is not None and self.module._compiled_call_impl is self._around:
            self.module._compiled_call_impl = self._around.call

    def _register(self, before: _Before, after: OurHook) -> None:
        # A prepended hook runs before those that are there, another one behind them.
        self._handles.append(self.module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self.module.register_forward_hook(after, always_call=True))

    def _unregister(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _accumulated(events: Events, group: ParamGroup, piece: Piece) -> Callable[[Tensor], None]:
    # Python's collector does not see through these hooks: what they hold, down to the parameter, would never be freed.
    listener, of = weakref.ref(events), weakref.ref(group)

    def gradient(param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        events, group = listener(), of()
        if events is not None and group is not None:
            events.gradient(group, piece, param)

    return gradient
