"""The state of a pass through the model: its activity, its thread, and its groups of parameters.

Note [When is a group done in backward]
    The number of gradients does not decide it: an unused expert gets none, a frozen group gets none, and under
    reentrant checkpointing a parameter gets several. The order of nodes decides it: autograd runs nodes in the reverse
    order of their creation. So when a gradient first reaches an output of another group, every group that does not
    enclose that group has no node left to run. All remaining groups are done when backward ends.

Note [When is a gradient final]
    Autograd adds up all contributions to a parameter before it delivers the gradient, once per backward. So when every
    parameter of a group has its gradient, no further one arrives, and an early step of the group relies on no order.
    The exception is reentrant checkpointing, which runs backwards inside a backward, and each of them delivers
    gradients. So these groups wait for the end of backward: a group that was called more than once, a group that such a
    checkpoint used and that another module read as well, a group that gathered() showed to code that autograd records,
    and a group with a parameter that gets no gradient.

    A graph without the group's gradient may still need an old value after the early step. Torch refuses that value,
    because the parameter has another version. The schedule refuses a recomputation that reads the new value if the
    group moves; if it does not move, no hook sees the read. Frozen parameters of the group may still be read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch

from tiering.errors import EngineStateError
from zero3.params.compilation import in_compiled_autograd
from zero3.params.param_group import ParamGroup

RELEASE_TIMEOUT = 1.0  # seconds in which autograd's threads drop a backward that an exception has ended


class PassState(Enum):
    """The activity of the model. A recomputation inside of a backward is part of that backward.

    Resident groups are on the device in every state. Each state names the other groups that are there.
    """

    IDLE = auto()
    """No module of the model runs, and no backward. On the device: prefetched groups."""
    FORWARD = auto()
    """A module runs. On the device: the groups of running modules, and prefetched groups."""
    BACKWARD = auto()
    """Autograd runs, and no parameter has received a gradient (torch.autograd.grad accumulates none). On the device:
    the group that backward is in, the groups that enclose it, recomputed groups, and prefetched groups."""
    ACCUMULATING = auto()
    """As BACKWARD, and gradients of parameters arrive. On the device also: gradients until they have left it."""
    STEPPING = auto()
    """As ACCUMULATING, and each group is updated as soon as its gradients are final (step 'in_backward')."""
    CLOSED = auto()
    """The engine is closed. No pass may begin."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and has not ended."""
        return self in (PassState.BACKWARD, PassState.ACCUMULATING, PassState.STEPPING)


class CurrentPass:
    """The ``state`` and its transitions. Each transition names the states that it may leave."""

    def __init__(self) -> None:
        self.state = PassState.IDLE

    def to_forward(self) -> None:
        """The outermost module is called; or the backward that ran inside of a module has ended."""
        self._leave(PassState.IDLE, PassState.BACKWARD, PassState.ACCUMULATING, PassState.STEPPING)
        self.state = PassState.FORWARD

    def to_backward(self) -> None:
        """A gradient has reached an output of the model."""
        self._leave(PassState.IDLE, PassState.FORWARD)
        self.state = PassState.BACKWARD

    def to_accumulating(self) -> None:
        """A parameter receives a gradient, the first one of this backward."""
        self._leave(PassState.BACKWARD)
        self.state = PassState.ACCUMULATING

    def to_stepping(self) -> None:
        """This backward is the one that updates parameters."""
        self._leave(PassState.ACCUMULATING)
        self.state = PassState.STEPPING

    def to_idle(self) -> None:
        """The pass has ended, or an exception has ended it."""
        self._leave(*(state for state in PassState if state is not PassState.CLOSED))
        self.state = PassState.IDLE

    def to_closed(self) -> None:
        """The engine ends."""
        self._leave(PassState.IDLE)
        self.state = PassState.CLOSED

    def _leave(self, *states: PassState) -> None:
        assert self.state in states, f"a pass in state {self.state.name} cannot make this transition"


class PassThread:
    """The one thread that runs the forwards of a pass, and whether autograd still runs its backward.

    Groups are unsharded and resharded for one pass at a time.
    """

    def __init__(self) -> None:
        self._forward_thread = 0
        self._backward: Callable[[], object | None] = _no_backward

    def claim(self, *, backward_runs: bool, forward_runs: bool) -> None:
        """The calling thread runs the pass. EngineStateError if another one does.

        ``backward_runs``: a backward has begun and has not ended, unless an exception has ended it. ``forward_runs``: a
        forward runs, and its groups move.
        """
        if backward_runs and self._backward_runs():
            raise EngineStateError(
                "the engine was called while a backward is running in another thread, which uses the same parameters"
                " and gradients. Guard both calls with a lock, or make them in one thread"
            )
        if forward_runs and self._is_other():
            raise EngineStateError(
                "the model was called from a second thread while a forward is running, but its parameters are moved for"
                " one pass at a time. Guard the calls with a lock, or use offload_param: none"
            )
        self._forward_thread = threading.get_ident()

    def begin_backward(self, backward: Callable[[], object | None]) -> None:
        """``backward`` returns an object as long as autograd runs the backward that begins now, then None."""
        self._backward = backward

    def _is_other(self) -> bool:
        """Whether the pass belongs to another thread that still exists."""
        if self._forward_thread == threading.get_ident():
            return False
        return any(thread.ident == self._forward_thread for thread in threading.enumerate())

    def _backward_runs(self) -> bool:
        """Whether autograd still runs the backward that has begun. Waits up to ``RELEASE_TIMEOUT`` for its end.

        A backward that an exception ended is over as soon as autograd's own thread drops it, a moment after the
        exception has reached the caller: without the wait, a loop that retries would be refused.
        """
        deadline = time.monotonic() + RELEASE_TIMEOUT
        while runs := self._backward() is not None:
            if time.monotonic() > deadline:
                break
            # The GIL is free meanwhile, so that the thread of autograd can drop the pass.
            time.sleep(0.001)
        return runs


def _no_backward() -> None:
    return None


def check_backward(state: PassState, *, moves: bool) -> None:
    """EngineStateError if no backward may begin in ``state``; ``moves``: groups of the model move."""
    if state is PassState.CLOSED:
        raise EngineStateError(
            "backward was called after close() or release(), on the graph of an earlier forward; run the forward"
            " again with the engine or model that is in use now"
        )
    if torch.is_grad_enabled() and moves:
        raise EngineStateError(
            "backward was called with create_graph=True: gradients of gradients are not supported in this"
            " version while parameters are offloaded; use offload_param: none"
        )
    if in_compiled_autograd():
        raise EngineStateError(
            "backward was called under torch's compiled autograd, which does not report its end: leave"
            " torch._dynamo.config.compiled_autograd at False; the backwards of blocks are compiled without it"
        )


@dataclass(slots=True)
class GroupProgress:
    """How far the pass is with one group.

    ``running`` and ``called`` live until an exception ends a pass. The counters below them restart with each pass.
    """

    enclosing: frozenset[ParamGroup]  # groups around this one, and beside it
    beside: ParamGroup | None  # the other group of the same modules
    expected: int  # trained parameters of the group: the gradients that complete it
    running: int = 0  # forwards that use the group now
    called: bool = False  # whether a forward used the group since an exception last ended a pass
    forwards: int = 0
    graphs: int = 0  # forwards that backward can enter
    entered: int = 0  # graphs that backward has entered
    arrived: int = 0  # gradients in this backward
    reads: int = 0  # by forwards of other modules
    unrecorded: bool = False  # used by a forward without gradients, as by a reentrant checkpoint
    gathered: bool = False  # shown by gathered() to code that autograd records

    def count_forward(self) -> None:
        """A forward of the group begins."""
        self.forwards += 1
        self.graphs += torch.is_grad_enabled()
        self.unrecorded |= not torch.is_grad_enabled()

    def count_read(self) -> None:
        """A forward of another module reads parameters of the group."""
        self.reads += 1
        self.unrecorded |= not torch.is_grad_enabled()

    @property
    def is_final(self) -> bool:
        """Whether no further gradient of the group can arrive: see Note [When is a gradient final]."""
        in_parts = self.unrecorded and self.forwards + self.reads > 1
        may_return = self.forwards > 1 or in_parts or self.gathered or self.running
        return self.arrived == self.expected and not may_return

    def is_over(self, *, entered: bool) -> bool:
        """Whether backward does not return to the group. ``entered``: it has left a forward of the group for good."""
        through = entered and self.entered >= max(1, self.graphs)
        return through or self.arrived == self.expected > 0

    def reset(self) -> None:
        """The pass has ended."""
        self.forwards = self.graphs = self.entered = self.arrived = self.reads = 0
        self.unrecorded = self.gathered = False


class RowsInBackward:
    """A block that backward goes through chunk by chunk of its rows. ``groups``: those of the block."""

    def __init__(self, groups: frozenset[ParamGroup]) -> None:
        self._groups = groups
        self._is_last = False

    def begin_chunk(self, is_last: bool) -> None:
        """The next gradients are those of another chunk."""
        self._is_last = is_last

    def completes(self, group: ParamGroup, progress: GroupProgress) -> bool:
        """Whether a gradient of ``group`` that arrives now may be the last one of its parameter.

        Those of groups around the block may get more from elsewhere. Persistent groups have no modules around them.
        """
        inside = group in self._groups or not group.entries or not self._groups.isdisjoint(progress.enclosing)
        return self._is_last and inside


class RunningForward:
    """A module that runs, and the groups that it uses without being one of their entries."""

    def __init__(self) -> None:
        self.borrowed: list[ParamGroup] = []  # read directly, until this forward ends
        self.early: list[ParamGroup] = []  # unsharded before the call that needs them
        self.counted: list[ParamGroup] = []  # whose calls in it are counted already
        self.first_node = next_node()
        self.with_grad = torch.is_grad_enabled()


class GroupsInPass:
    """The groups of a pass: the ``progress`` of each, the forwards that use them, and those that backward holds."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self.progress = {
            group: GroupProgress(
                enclosing=_enclosing(group, groups),
                beside=None if group.beside is None else groups[group.beside],
                expected=sum(piece.trainable for piece in group.layout.pieces),
            )
            for group in groups
        }
        # Groups of forwards that backward can follow, in the order of their first use.
        self.used: dict[ParamGroup, None] = {}
        self.forwards: list[RunningForward] = []  # outermost first
        self.live: list[ParamGroup] = []  # groups that stay on the device for backward
        self.until_end: set[ParamGroup] = set()  # live groups that only the end of backward releases
        self.stepped: set[ParamGroup] = set()  # groups that this backward has updated
        # The group that backward entered last, the autograd nodes that its forward made, and the graph task.
        self._entered: tuple[ParamGroup, range, int] | None = None

    def count_forward(self, group: ParamGroup) -> None:
        """A forward of ``group`` begins, or code that calls its modules many times, which count once."""
        if in_autograd() or any(group in forward.counted for forward in self.forwards):
            return
        self.progress[group].count_forward()
        # Reentrant checkpointing disables gradients inside: the outermost forward says whether backward follows.
        if self.forwards[0].with_grad:
            self.used.setdefault(group)

    def forward_nodes(self) -> range:
        """The sequence numbers of the autograd nodes that the innermost running forward has made so far."""
        return range(self.forwards[-1].first_node, next_node()) if self.forwards else range(0)

    def enter(self, group: ParamGroup, nodes: range) -> list[ParamGroup]:
        """Backward reaches the output of a forward of ``group``, which made ``nodes``. Returns the groups it has left.

        Those that do not enclose ``group``: see Note [When is a group done in backward].
        """
        self._entered = group, nodes, graph_task()
        # Code that calls the modules of the group many times enters it once.
        self.progress[group].entered += not self.progress[group].running
        keep = self.progress[group].enclosing | self.until_end
        return [live for live in self.live if live is not group and live not in keep]

    def unrelated(self, group: ParamGroup, in_use: set[ParamGroup]) -> list[ParamGroup]:
        """The live groups that neither enclose ``group`` nor lie inside of it, without those ``in_use``."""
        keep = self.progress[group].enclosing | in_use | self.until_end | {*group.same_expert}
        inside = [live for live in self.live if group in self.progress[live].enclosing]
        return [live for live in self.live if live not in keep and live not in inside]

    def recomputes_itself(self, group: ParamGroup) -> bool:
        """Whether the running node was made by the forward of ``group`` that backward entered last.

        Then checkpointing runs that forward again without the module's hooks (as transformers does). Its graph is used
        up before backward enters another group, which finishes this one.
        """
        node = torch._C._current_autograd_node()
        if self._entered is None or node is None:
            return False
        entered, nodes, task = self._entered
        # Each thread numbers its own nodes, so equal numbers of another graph task mean other nodes.
        same = group in (entered, self.progress[entered].beside) or (
            group.routing is not None and entered in self.progress[group].enclosing
        )
        return same and task == graph_task() and node._sequence_nr() in nodes

    def is_in_use(self, group: ParamGroup) -> bool:
        """Whether a forward uses ``group``, or backward holds it."""
        return bool(self.progress[group].running) or group in self.live

    def is_final(self, group: ParamGroup) -> bool:
        """Whether no further gradient of ``group`` can arrive, and this backward has not updated it."""
        return self.progress[group].is_final and group not in self.stepped

    def check_not_stepped(self, group: ParamGroup) -> None:
        """EngineStateError if this backward has updated ``group``, which a recomputation is about to read."""
        if group in self.stepped and self.progress[group].expected:
            raise EngineStateError(
                f"a recomputation reads parameters of group {group.name!r} after tiering.step 'in_backward' has updated"
                " them, so it would not repeat the forward. Set tiering.step to 'deferred' or 'after'"
            )

    def on_device(self) -> set[ParamGroup]:
        """The groups that the pass may have on the device."""
        return {*self.live, *(group for group, progress in self.progress.items() if progress.called)}

    def abandon(self) -> None:
        """An exception ended the pass: nothing uses a group any longer."""
        self.live.clear()
        self.until_end.clear()
        for progress in self.progress.values():
            progress.running, progress.called = 0, False
        self.forwards.clear()

    def end_backward(self) -> None:
        """Every gradient of this pass has arrived: no group is kept any longer."""
        self.until_end.clear()
        self._entered = None

    def reset(self) -> None:
        """The pass has ended."""
        for progress in self.progress.values():
            progress.reset()
        self.used.clear()
        self.stepped.clear()


def _enclosing(group: ParamGroup, groups: list[ParamGroup]) -> frozenset[ParamGroup]:
    """The group beside ``group``, and the groups around both, to the root."""
    enclosing, at = set[ParamGroup](), group
    while True:
        enclosing |= {at} if at.beside is None else {at, groups[at.beside]}
        if at.parent is None:
            return frozenset(enclosing - {group})
        at = groups[at.parent]


def next_node() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def graph_task() -> int:
    """The number of the backward pass that this thread runs, -1 if none. A pass inside another has its own number."""
    task: int = torch._C._current_graph_task_id()
    return task


def in_autograd() -> bool:
    """Whether this thread runs a backward. A recomputation under checkpointing counts."""
    return graph_task() != -1
