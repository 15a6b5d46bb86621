"""The pass schedule against every order of events that autograd can produce.

Hypothesis writes programs: which modules call which, under which kind of checkpointing, what their outputs hide, where
something is raised, which graphs are run backward, together or one after the other or twice. A small model of autograd
runs them: nodes in reverse order of their creation, hooks before the node whose output they watch, saved tensors when
the node asks for them, a parameter's gradient once all its uses have run, callbacks when the (nested) pass has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from zero3.params.layout import FlatLayout
from zero3.params.param_group import Residency
from zero3.passes import schedule as schedule_module
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


INDEXES = st.integers(1, len(PARENTS) - 1)


def calls(inner: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    return st.builds(
        Call,
        group=INDEXES,
        calls=st.lists(inner, max_size=3).map(tuple),
        reads=st.lists(INDEXES, max_size=2).map(tuple) | st.just(()),
        tail=st.booleans(),
        watched=st.sampled_from([True, True, True, False]),
        checkpoint=st.sampled_from(["", "", "saved", "reentrant"]),
        late=st.booleans(),
        stop=st.sampled_from([0, 0, 1, 2]),
        catches=st.booleans(),
    )


LEAF = st.builds(
    Call, group=INDEXES, watched=st.booleans(), checkpoint=st.sampled_from(["", "saved", "reentrant"])
)

MODEL = st.lists(st.recursive(LEAF, calls, max_leaves=6), min_size=1, max_size=4).map(tuple)
MODELS = st.lists(MODEL, min_size=1, max_size=3)
ROOM = len(PARENTS)


@contextmanager
def autograd(room: int = ROOM) -> Iterator[Autograd]:
    model = Autograd(room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_module, "call_at_end_of_backward", model.queue)
        patch.setattr(schedule_module, "in_autograd", lambda: bool(model.callbacks))
        patch.setattr(torch._C, "_current_autograd_node", lambda: model.node)
        yield model


THOROUGH = settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@THOROUGH
@given(MODELS)
def test_each_forward_with_its_backward(models: list[tuple[Call, ...]]) -> None:
    with autograd() as torch_model:
        for model in models * 2:
            tape = torch_model.forward(model)
            unsharded = [group.name for group in torch_model.groups if group.residency is Residency.UNSHARDED]
            assert unsharded == [], "still unsharded between forward and backward"
            torch_model.backward(tape)
            torch_model.check_quiet()
            assert torch_model.gradients.received.keys() >= {f"g{use}" for node in tape for use in node.uses}
            torch_model.gradients.reset()
        assert torch_model.began == torch_model.ended > 0


def chain(group: int) -> set[int]:
    """``group`` and those around it, as far as they move."""
    around = {group}
    while (parent := PARENTS[group]) is not None:
        group = parent
        around.add(group)
    return around - {RESIDENT}


def least_room(model: tuple[Call, ...], around: frozenset[int] = frozenset({0})) -> int:
    """The most groups that one moment of these forwards needs, each with those around it."""
    most = len(around)
    for call in model:
        most = max(most, least_room(call.calls, around | chain(call.group)))
    return most


def modest(inner: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    """Calls that need no room for what they read elsewhere."""
    return calls(inner).map(lambda call: replace(call, reads=()))


MODEST = st.lists(st.recursive(LEAF, modest, max_leaves=6), min_size=1, max_size=4).map(tuple)


@THOROUGH
@given(st.lists(MODEST, min_size=1, max_size=3), st.integers(0, 3))
def test_no_more_room_is_used_than_a_moment_needs(models: list[tuple[Call, ...]], spare: int) -> None:
    """With any more to fetch ahead into: prefetch never holds what compute waits for."""
    with autograd(max(map(least_room, models)) + spare) as torch_model:
        for model in models * 2:
            torch_model.backward(torch_model.forward(model))
            torch_model.forward(model, grad=False)
            torch_model.check_quiet()


@pytest.mark.slow
@THOROUGH
@given(MODELS, st.data())
def test_graphs_of_several_forwards_in_any_order(models: list[tuple[Call, ...]], data: st.DataObject) -> None:
    """Older first, newer first, twice over one graph, several in one pass, evaluation in between."""
    with autograd() as torch_model:
        tapes = [torch_model.forward(model) for model in models]
        numbers = st.lists(st.sampled_from(range(len(tapes))), min_size=1, max_size=2)
        for together in data.draw(st.lists(numbers, min_size=1, max_size=4)):
            torch_model.backward([node for number in sorted(set(together)) for node in tapes[number]])
            torch_model.check_quiet()
            if data.draw(st.booleans()):
                torch_model.forward(models[0], grad=False)
                torch_model.check_quiet()


@THOROUGH
@given(MODELS, st.integers(0, 60), st.sampled_from([BoomError, KeyboardInterrupt]), st.booleans())
def test_whatever_is_raised_at_any_moment(
    models: list[tuple[Call, ...]], fuse: int, kind: type[BaseException], guarded: bool
) -> None:
    """After it nothing is held, at the latest when the next forward begins, and passes run as if it never was."""
    with autograd() as torch_model:
        torch_model.fuse, torch_model.kind = fuse, kind
        for model in models:
            with suppress(BoomError, KeyboardInterrupt):
                torch_model.backward(torch_model.forward(model, guarded=guarded), guarded=guarded)
        event("raised" if torch_model.fuse < 0 else "not reached")
        torch_model.fuse = -1
        if not guarded:
            torch_model.forward((), grad=False)
        torch_model.check_quiet()
        torch_model.gradients.reset()
        ended_before = torch_model.ended
        for model in models:
            torch_model.backward(torch_model.forward(model))
            torch_model.check_quiet()
        assert torch_model.ended > ended_before
