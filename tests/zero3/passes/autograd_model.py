"""A model of autograd: it runs forwards and backwards of nested modules, and sends the pass schedule their events.

Nodes run in the reverse order of their creation, hooks before the node whose output they watch; saved tensors are
handed out when the node asks for them, a parameter's gradient once all its uses have run; callbacks are called when the
(nested) pass has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from zero3.params.layout import FlatLayout
from zero3.params.param_group import Residency
from zero3.passes.pass_state import PassState
from zero3.passes.prefetch import Prefetcher
from zero3.passes.schedule import PassSchedule

# Group 0 is the root's; 1 to 3 are blocks; 4 and 5 lie inside of block 1; 6 inside of 4; 7 is always resident.
PARENTS = [None, 0, 0, 0, 1, 1, 4, None]
RESIDENT = 7


class Device:
    """Room for so many groups at once."""

    def __init__(self, room: int) -> None:
        self.room = room


class Group:
    """Stands for a ParamGroup: counts against the room of the device."""

    moves = False  # what autograd saves is handed out by the model of autograd below
    through_window = sharded = stays = False
    routing = None
    same_expert = ()
    beside = None

    def __init__(self, index: int, device: Device) -> None:
        self.index, self.name, self.parent = index, f"g{index}", PARENTS[index]
        self.params: list[Any] = []
        self.entries: list[Any] = []
        self.layout = FlatLayout((), 0, 0)
        self.storage_key = id(self)
        self.device = device
        self.residency = Residency.RESIDENT if index == RESIDENT else Residency.SHARDED
        self.is_shown = index == RESIDENT

    def advance(self) -> None:
        pass

    def unshard(self, *, wait: bool = False) -> bool:
        if self.residency is not Residency.SHARDED:
            return True
        if self.device.room == 0:
            assert not wait, f"{self.name} waits for room that nobody will give back"
            return False
        self.device.room -= 1
        self.residency = Residency.FETCHING
        return True

    def wait_for_unshard(self) -> None:
        assert self.residency is not Residency.SHARDED
        if self.residency is Residency.FETCHING:
            self.residency = Residency.UNSHARDED

    def reshard(self, *, keep_edits: bool = True) -> None:
        if self.residency in (Residency.FETCHING, Residency.UNSHARDED):
            self.device.room += 1
            self.residency = Residency.SHARDED
            self.is_shown = False

    def show(self) -> None:
        assert self.usable
        self.is_shown = True

    def hide(self) -> None:
        self.is_shown = self.residency is Residency.RESIDENT

    @property
    def usable(self) -> bool:
        return self.residency in (Residency.UNSHARDED, Residency.RESIDENT)


class Gradients:
    """Stands for the GradientStore: a window is open from a group's first gradient until it is closed."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.received: Counter[str] = Counter()

    def accumulate(self, group: Group, piece: Any, param: Any) -> None:
        self.open.add(group.name)
        self.received[group.name] += 1

    def close(self, group: Group, *, last: bool) -> None:
        self.open.discard(group.name)

    received_elsewhere = False

    def begin(self, used: Any) -> None:
        pass

    def final(self, group: Any) -> None:
        pass

    def close_all(self) -> None:
        self.open.clear()

    def reset(self) -> None:
        self.open.clear()
        self.received.clear()


@dataclass(frozen=True)
class Call:
    """A module's forward: reads its parameters, calls others, and reads its own once more if ``tail``."""

    group: int
    calls: tuple[Call, ...] = ()
    reads: tuple[int, ...] = ()  # groups of other modules, read without calling them
    tail: bool = True
    watched: bool = True  # its output is a tensor that hooks see, not hidden in an object
    checkpoint: str = ""  # "saved": non-reentrant; or "reentrant"
    late: bool = True  # nodes unpack the activation (which may be recomputed) before the parameter
    stop: int = 0  # recomputation ends early, once so many forwards were entered; 0: never
    catches: bool = False  # what its callees raise


class BoomError(Exception):
    """The user's own, anywhere."""


class StoppedError(Exception):
    """Torch's: what was asked for has been recomputed."""


@dataclass
class Node:
    """A node of the graph. ``outputs``: the groups whose hooks watch what it made, in the order of registration."""

    uses: tuple[int, ...]
    outputs: list[int] = field(default_factory=list)
    region: Call | None = None  # recomputed when this node asks for an activation
    reentrant: Call | None = None  # a checkpoint's own node
    late: bool = True

    def _sequence_nr(self) -> int:
        return -1  # of no forward


class Autograd:
    """Runs calls and graphs, and tells the schedule what hooks would."""

    def __init__(self, room: int) -> None:
        self.device, self.total = Device(room), room
        self.groups = [Group(index, self.device) for index in range(len(PARENTS))]
        self.gradients = Gradients()
        self.began = self.ended = 0
        self.prefetcher = Prefetcher()
        self.passes = PassSchedule(
            self.groups,
            self.prefetcher,
            self.gradients,
            self,
        )
        self.callbacks: list[list[Callable[[], None]]] = []  # of each backward pass that runs, innermost last
        self.node: Node | None = None
        self.inside: list[set[int]] = []  # what each forward that runs has read so far
        self.fuse = -1  # so many moments until ``kind`` is raised; negative: never
        self.kind: type[BaseException] = BoomError

    # The listener of the schedule.

    def on_backward(self) -> None:
        self.began += 1

    def on_first_gradient(self) -> bool:
        return False

    def on_gradient(self) -> None: ...

    def on_group_done(self, group: Group, final: bool) -> None:
        pass

    def on_end_of_backward(self) -> None:
        self.ended += 1

    def moment(self) -> None:
        """The user's code runs here, and may raise."""
        if self.fuse == 0:
            self.fuse = -1
            raise self.kind
        self.fuse -= self.fuse > 0

    # Forward.

    def forward(self, calls: tuple[Call, ...], *, grad: bool = True, guarded: bool = True) -> list[Node]:
        """The model's forward; ``guarded``: called through the engine."""
        tape: list[Node] = []
        try:
            self.compute(Call(0, calls), tape if grad else None, None, None)
        except BaseException:
            if guarded:
                self.passes.abandon()
            raise
        finally:
            self.inside.clear()
        return tape

    def run(self, call: Call, tape: list[Node] | None, region: Call | None, budget: list[int] | None) -> None:
        """``call``, under its checkpoint. ``left``: forwards that a recomputation still enters."""
        if call.checkpoint == "reentrant" and tape is not None:
            self.compute(call, None, None, budget)
            tape.append(Node((), [], region, reentrant=call))
        else:
            self.compute(call, tape, call if call.checkpoint == "saved" else region, budget)

    def compute(
        self, call: Call, tape: list[Node] | None, region: Call | None, budget: list[int] | None
    ) -> None:
        group: Any = self.groups[call.group]
        encloses = call.group in PARENTS
        self.inside.append(set())
        if encloses:
            self.passes.begin_forward(tape is not None, whole=call.group == 0)
        self.passes.pre_forward(group)
        try:
            self.forward_of(call, tape, region, budget)
        except Exception:
            # Torch calls such hooks after exceptions, too, but not after KeyboardInterrupt.
            self.passes.post_forward(group)
            if encloses:
                self.passes.end_forward()
            raise
        else:
            self.passes.post_forward(group)
            if encloses:
                self.passes.end_forward()
        finally:
            if self.inside:
                self.inside.pop()

    def forward_of(
        self, call: Call, tape: list[Node] | None, region: Call | None, budget: list[int] | None
    ) -> None:
        nodes = tape if tape is not None else []
        self.moment()
        if budget is not None:
            budget[0] -= 1
            if budget[0] == 0:
                raise StoppedError
        for other in (call.group, *call.reads):
            if not self.groups[other].is_shown:
                assert other != call.group, "a module runs and its own parameters are not shown"
                assert self.passes.borrow(self.groups[other])
            assert self.groups[other].is_shown
            self.inside[-1].add(other)
        uses = (call.group, *call.reads)
        nodes.append(Node(uses, [], region, late=call.late))
        for inner in call.calls:
            self.check_inside()
            try:
                self.run(inner, tape, region, budget)
            except BoomError:
                if not call.catches:
                    raise
            self.check_inside()
            self.moment()
        if call.tail:
            nodes.append(Node(uses, [], region, late=call.late))
        if call.watched:
            nodes[-1].outputs.append(call.group)

    def check_inside(self) -> None:
        absent = [index for read in self.inside for index in read if not self.groups[index].usable]
        assert not absent, f"groups {absent} are not there while modules compute with them"

    # Backward.

    def backward(self, tape: list[Node], *, guarded: bool = True) -> None:
        """Over one graph, or several whose losses were summed; ``guarded``: by engine.backward."""
        try:
            self.sweep(tape)
        except BaseException:
            self.callbacks.clear()
            self.inside.clear()
            self.node = None
            if guarded:
                self.passes.abandon()
                self.gradients.reset()
            raise

    def queue(self, callback: Callable[[], None]) -> Callable[[], object]:
        """What autograd does with a callback for the end of the pass that runs; says whether that still does."""
        queued = self.callbacks[-1]
        queued.append(callback)
        return lambda: next((True for callbacks in self.callbacks if callbacks is queued), None)

    def sweep(self, tape: list[Node]) -> None:
        """One backward pass of autograd's, perhaps inside of a node of another."""
        self.callbacks.append([])
        pending = Counter(group for node in tape for group in node.uses)
        for node in reversed(tape):
            outer, self.node = self.node, node
            self.execute(node)
            self.node = outer
            pending.subtract(node.uses)
            for group in node.uses:
                if pending[group] == 0:
                    self.passes.gradient(self.groups[group], None, None)
                    self.moment()
        for callback in self.callbacks.pop():
            callback()

    def execute(self, node: Node) -> None:
        for group in node.outputs:
            self.moment()
            self.passes.pre_backward(self.groups[group])
        if not node.late:
            self.unpack(node)
        if node.region is not None:
            self.recompute(node.region)
        if node.late:
            self.unpack(node)
        self.moment()
        absent = [group for group in node.uses if not self.groups[group].usable]
        assert not absent, f"groups {absent} are not there when a node uses them"
        if node.reentrant is not None:
            inner: list[Node] = []
            before, self.inside = self.inside, []
            self.compute(node.reentrant, inner, None, None)
            self.inside = before
            self.sweep(inner)

    def unpack(self, node: Node) -> None:
        for group in node.uses:
            if group != RESIDENT:  # what never moves is not marked
                self.passes._saved.hand_out(self.groups[group])

    def recompute(self, region: Call) -> None:
        before, self.inside = self.inside, []
        with self.passes._saved.recomputing(), suppress(StoppedError):
            self.compute(region, [], None, [region.stop] if region.stop else None)
        self.inside = before

    # What must hold between passes.

    def check_quiet(self) -> None:
        unsharded = [group.name for group in self.groups if group.residency is Residency.UNSHARDED]
        assert unsharded == [], "still unsharded"
        fetching = sum(group.residency is Residency.FETCHING for group in self.groups)
        assert self.device.room + fetching == self.total
        assert self.passes.state is PassState.IDLE
        assert self.gradients.open == set(), "a gradient window is still open"
        self.prefetcher.forget()
        assert self.device.room == self.total, "what was fetched ahead is not given back"
