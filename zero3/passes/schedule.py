"""The pass schedule: which groups are unsharded when, and when their gradients are complete.

Note [When is a group done in backward]
    Counting gradients does not tell: unused experts get none, a frozen group gets none, under reentrant checkpointing
    a parameter gets several. The order tells: autograd runs nodes in the reverse of their creation, so when a gradient
    first reaches another group's output, every group that does not enclose that one has no node left to run. What is
    still live when backward ends is done then.

Note [When is a gradient final]
    Autograd adds up all contributions to a parameter before it hands out the gradient, once per backward. So once every
    parameter of a group has its gradient, none is to come: to step the group early no order has to be trusted. Only
    reentrant checkpointing runs backwards inside of backwards, which each hand out gradients: a group that was called
    more than once, or lent by gathered() to what autograd records, waits for the end. So does one with a parameter that
    gets no gradient. A value that is still needed after all, by a graph that does not ask for its gradient, has another
    version then, which torch refuses to use; a recomputation that reads it anew is refused here, where the group moves;
    where it does not, nobody sees that read. What of the group is frozen may be read on.

An event moves groups in several steps: Ctrl-C waits until they are consistent again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tiering.errors import ArenaError, EngineStateError, ResidencyError
from tiering.interrupts import deferred_interrupts, uninterrupted
from zero3.device.closed_storage import can_close
from zero3.device.timeline import Timeline
from zero3.params import resharded
from zero3.params.compiled_modules import in_compiled_autograd, is_compiled
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup, Residency
from zero3.passes.activations import Activations
from zero3.passes.hooks import call_at_end_of_backward, check_transform, graph_task, in_autograd, next_node
from zero3.passes.pass_state import CurrentPass, PassState
from zero3.passes.prefetch import Prefetcher
from zero3.passes.saved_tensors import SavedTensors

LETTING_GO = 1.0  # seconds in which autograd's threads drop a backward that an exception has ended


class GradientSink(Protocol):
    """What takes gradients as they arrive: a GradientStore, or what reduces them over ranks first."""

    @property
    def received_elsewhere(self) -> bool:
        """Whether some rank got a gradient in the last backward, this one or not."""

    @property
    def takes_parts(self) -> bool:
        """Whether ``accumulate`` may be called for each part of a gradient: see gradient_parts.py."""

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins, of forwards that have used these groups, in this order."""

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Take ``param.grad``."""

    def final(self, group: ParamGroup) -> None:
        """No gradient of ``group`` can come any more in this backward."""

    def close(self, group: ParamGroup, *, last: bool) -> None:
        """Backward has left ``group``; ``last``: it has been through all of its forwards, and should not come back."""

    def close_all(self) -> None:
        """Backward has ended."""

    def reset(self) -> None:
        """The gradients that are there are given up."""


class PassSchedule:
    """Listens to the hooks of ``groups`` (see hooks.Events) and moves groups and gradients accordingly.

    ``on_first_gradient`` returns whether this backward updates each group as soon as its gradients are final.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        prefetcher: Prefetcher,
        gradients: GradientSink,
        on_backward: Callable[[], None],
        on_first_gradient: Callable[[], bool],
        on_end_of_backward: Callable[[], None],
        on_group_done: Callable[[ParamGroup, bool], None],
        timeline: Timeline | None = None,
    ) -> None:
        self._prefetcher = prefetcher
        self._gradients = gradients
        self._on_backward = on_backward
        self._on_first_gradient = on_first_gradient
        self._on_end_of_backward = on_end_of_backward
        self._on_group_done = on_group_done
        self._timeline = timeline or Timeline()
        self._pass = CurrentPass()
        self._progress = {group: _Progress(_enclosing(group, groups), _trained(group)) for group in groups}
        # By forwards that backward can follow, in the order of their first use.
        self._used: dict[ParamGroup, None] = {}
        self._forwards: list[_Forward] = []  # that are running, outermost first
        self._live: list[ParamGroup] = []  # held for backward
        self._until_end: set[ParamGroup] = set()  # of these, those that only the end of backward releases
        # By backward, last, and the autograd nodes that its forward made, in which graph task.
        self._entered: tuple[ParamGroup, range, int] | None = None
        self._backward: Callable[[], object | None] = _nothing  # gives something while autograd runs that one
        self._stepped: set[ParamGroup] = set()  # updated by this backward
        self._saved = SavedTensors(groups, self.need, self._stepped)
        self._thread = 0  # of the forwards that are running

    @property
    def state(self) -> PassState:
        """What the model does now."""
        return self._pass.state

    @property
    def takes_parts(self) -> bool:
        """Whether gradients of tied parameters are taken in parts."""
        return self._gradients.takes_parts

    @property
    def activations(self) -> Activations:
        """What autograd keeps for backward, beside the tiers."""
        return self._saved.activations

    @uninterrupted
    def begin_forward(self, training: bool, *, whole: bool = True) -> None:
        """A module outside of the blocks, the ``whole`` model or not, is called; the outermost call begins a pass."""
        self.check_thread()
        if not in_autograd():
            if self.state.in_backward:
                # A backward that nobody guarded (the user's loss.backward()) ended by an exception: start clean.
                self.abandon()
                self._gradients.reset()
            elif whole and self._forwards:
                self.abandon()  # so did a forward that nobody guarded: the model does not call itself
            if not self._forwards:
                self._prefetcher.begin_pass(training)
        self._enter()

    @uninterrupted
    def end_forward(self, *, raised: bool = False) -> None:
        """The module that ``begin_forward`` told of has returned or raised."""
        self._leave(raised=raised)

    @uninterrupted
    def unshard_early(self, group: ParamGroup) -> None:
        """The module that ``begin_forward`` told of will call ``group`` first, and looks at it before that.

        It takes no more room than that call, with whose end it goes; or with the module's if there is no such call.
        """
        self._forwards[-1].early.append(group)
        self._use(group)

    @uninterrupted
    def pre_forward(self, group: ParamGroup) -> None:
        self.check_thread()
        self._check_not_stepped(group)
        self._enter()
        if not in_autograd():
            progress = self._progress[group]
            progress.forwards += 1
            progress.graphs += torch.is_grad_enabled()
            if self._forwards[0].with_grad:  # under reentrant checkpointing only the outermost is
                self._used.setdefault(group)
        try:
            self._use(group)
        except BaseException:
            self._leave(raised=True)
            self._stop_using(group, raised=True)
            raise
        self._end_early(group)
        if self._timeline.recording:
            self._timeline.begin("compute", f"forward {group.name}")

    @uninterrupted
    def post_forward(self, group: ParamGroup, *, raised: bool = False) -> None:
        if self._timeline.recording:
            self._timeline.end("compute", f"forward {group.name}")
        self._leave(raised=raised)
        self._stop_using(group, raised=raised)

    @uninterrupted
    def borrow(self, group: ParamGroup, *, trained: bool = True) -> bool:
        """A parameter of ``group`` is read by a forward that is not one of its entries; False if none is running.

        ``trained``: it is one that steps change.

        The group stays until that forward ends. See Note [A resharded parameter points nowhere].
        """
        if trained:
            self._check_not_stepped(group)
        check_transform(group)
        if self._forwards:
            self._forwards[-1].borrowed.append(group)
            self._use(group)
            return True
        if in_autograd():
            self.begin_backward()
            self._make_room_and_hold(group)
            group.show()
            if torch.is_grad_enabled() and not self._recomputes_itself(group):
                # By a function recomputed outside of every module: nothing will tell when its graph is done.
                self._until_end.add(group)
            return True
        return False

    @uninterrupted
    def begin_backward(self) -> None:
        """A gradient has reached an output of the model or of a group. Further calls in the same pass do nothing."""
        if self.state is PassState.CLOSED:
            raise EngineStateError(
                "backward was called after close() or release(), through the graph of a forward before it; run the"
                " forward again with the engine, or the model, that is in use now"
            )
        if not self.state.in_backward:
            if torch.is_grad_enabled() and self._saved.owners:
                raise EngineStateError(
                    "backward was called with create_graph=True: gradients of gradients are not supported in this"
                    " version while parameters are offloaded; use offload_param: none"
                )
            if in_compiled_autograd():
                raise EngineStateError(
                    "backward was called under torch's compiled autograd, which does not tell when it ends: leave"
                    " torch._dynamo.config.compiled_autograd at False; blocks' own backwards are compiled without it"
                )
            self._pass.to_backward()
            self._backward = call_at_end_of_backward(self.end_of_backward)
            self._on_backward()
            self._gradients.begin(self._used)

    def forward_nodes(self) -> range:
        """The numbers of the autograd nodes that the innermost running forward has made so far."""
        return range(self._forwards[-1].first_node, next_node()) if self._forwards else range(0)

    @uninterrupted
    def pre_backward(self, group: ParamGroup, nodes: range = range(0)) -> None:
        """Backward enters a forward of ``group`` from behind, which made ``nodes``."""
        self.begin_backward()
        self._entered = group, nodes, graph_task()
        self._progress[group].entered += 1
        keep = self._progress[group].enclosing | self._until_end
        for other in [g for g in self._live if g is not group and g not in keep]:
            self._finish(other, left=True, entered=True)
        self._hold_for_backward(group)

    def need(self, group: ParamGroup) -> None:
        """Backward is about to use a saved tensor of ``group``. See Note [Backward enters a group from anywhere]."""
        if group in self._live or self._progress[group].running:
            return
        if not in_autograd():
            raise EngineStateError(
                f"a tensor that autograd saved from group {group.name!r} was asked for outside of backward, where the"
                " group is not unsharded; read it inside of the module's forward"
            )
        with deferred_interrupts():
            self.begin_backward()
            self._finish_unrelated(group)
            self._hold_for_backward(group)

    @uninterrupted
    def gradient(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        self._begin_receiving()
        self._progress[group].arrived += 1
        self._gradients.accumulate(group, piece, param)
        if self._is_final(group):
            self._gradients.final(group)

    @uninterrupted
    def gradient_part(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """A part of a gradient, which others may follow: the group's are final when backward ends."""
        self._begin_receiving()
        self._gradients.accumulate(group, piece, param)

    @uninterrupted
    def end_of_backward(self) -> None:
        """Every gradient of this pass has arrived."""
        if not self.state.in_backward:
            return
        received = self.state is not PassState.BACKWARD
        self._until_end.clear()
        self._entered = None
        for group in list(self._live):
            self._finish(group, left=True)
        self._gradients.close_all()
        self._saved.end_of_backward()
        self._reset()
        self._prefetcher.end_pass()
        if received or self._gradients.received_elsewhere:
            self._on_end_of_backward()

    @uninterrupted
    def abandon(self) -> None:
        """A pass ended by an exception: free what it held, so that the next one starts clean."""
        if self.state.in_backward:
            self._drop_fresh_gradients()
        called = [group for group, progress in self._progress.items() if progress.called]
        for group in {*self._live, *called}:
            if self._timeline.recording:
                self._timeline.end("compute", f"backward {group.name}")
            group.reshard(keep_edits=False)
        self._live.clear()
        self._until_end.clear()
        for group in called:
            self._progress[group].running, self._progress[group].called = 0, False
        self._forwards.clear()
        self._saved.leave_all()
        self._saved.end_of_backward()
        self._reset()
        self._prefetcher.forget()

    def gathers(self, group: ParamGroup) -> None:
        """Parameters of ``group`` are shown outside of its forwards: graphs that begin there bring gradients, too."""
        if torch.is_grad_enabled() and not in_autograd():
            self._progress[group].gathered = True

    def saving(self) -> AbstractContextManager[Any]:
        """Our hooks for saved tensors, outside of a pass."""
        return self._saved.hooks()

    def close(self) -> None:
        """No pass comes any more: free what one that was interrupted holds."""
        self.abandon()
        self._pass.to_closed()

    def _begin_receiving(self) -> None:
        """A gradient of a parameter is there, perhaps the first one of this backward."""
        self.begin_backward()
        if self.state is PassState.BACKWARD:
            self._pass.to_accumulating()
            if self._on_first_gradient():
                self._pass.to_stepping()

    def _elsewhere(self) -> bool:
        """Whether the forwards that are running run in another thread."""
        if not self._forwards or not self._saved.owners:
            return False
        if self._thread == threading.get_ident():
            return False
        return any(thread.ident == self._thread for thread in threading.enumerate())

    def _backward_elsewhere(self) -> bool:
        """Whether autograd is still running, for another thread, the backward that has begun.

        One that an exception has ended is over when autograd's own thread lets go of it, for which it needs a moment.
        """
        until = time.monotonic() + LETTING_GO
        while going_on := self.state.in_backward and self._backward() is not None:
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        return going_on

    def check_thread(self) -> None:
        """EngineStateError in a thread that is not that of the pass that is running; autograd's may recompute."""
        if in_autograd():
            return
        if self.state.in_backward and self._backward_elsewhere():
            raise EngineStateError(
                "the engine was called while a backward is running in another thread, which takes parameters and"
                " gradients for itself. Call both under a lock, or in one thread"
            )
        if self._elsewhere():
            raise EngineStateError(
                "the model was called from a second thread while a forward is running: its parameters come and go for"
                " one pass at a time. Call it under a lock, or use offload_param: none"
            )
        self._thread = threading.get_ident()

    def _recomputes_itself(self, group: ParamGroup) -> bool:
        """Whether the node that runs now was made by the forward of ``group`` that backward has entered last.

        Then what is running is that forward once more, called by checkpointing past our hooks (as transformers does):
        its graph is used up before backward enters another group, which ends this one.
        """
        node = torch._C._current_autograd_node()
        if self._entered is None or node is None:
            return False
        entered, nodes, task = self._entered
        # Each thread numbers the nodes that it makes: what it recomputes goes backward in a task of its own.
        return entered is group and task == graph_task() and node._sequence_nr() in nodes

    def _use(self, group: ParamGroup) -> None:
        progress = self._progress[group]
        progress.running, progress.called = progress.running + 1, True
        if progress.running == 1 and group not in self._live:
            if self.state.in_backward:  # recomputed under checkpointing
                self._finish_unrelated(group, left=True)
            self._acquire(group)
        group.show()

    def _acquire(self, group: ParamGroup) -> None:
        try:
            self._prefetcher.acquire(group)
        except ArenaError as error:
            if self._end_borrowing(but=group):
                return self._acquire(group)
            held = [
                other.name
                for other, progress in self._progress.items()
                if other is not group and (other in self._live or progress.running)
            ]
            raise ResidencyError(
                f"no room on the device for group {group.name!r} beside {held}, which are in use. The plan has room for"
                " a block and what encloses it; a module that reads another's parameters, or calls a block from inside"
                " a block, needs more: raise device_budget, or stage3_prefetch_bucket_size if the budget has room"
            ) from error

    def _end_borrowing(self, *, but: ParamGroup) -> bool:
        """Let go of what running modules have borrowed, ``but`` one group; False if that is nothing.

        Most who read a parameter are done with it, as a hook is that logs a norm. A view that is used again after all
        cannot be read then: only where storages are closed.
        """
        ended = False
        for forward in self._forwards if can_close() else ():
            given_up = [group for group in forward.borrowed if group is not but]
            forward.borrowed = [group for group in forward.borrowed if group is but]
            for group in given_up:
                self._stop_using(group, raised=False)
            ended = ended or bool(given_up)
        return ended

    def _stop_using(self, group: ParamGroup, *, raised: bool) -> None:
        progress = self._progress[group]
        if not progress.running:
            return  # the pass was abandoned under it
        progress.running -= 1
        if not progress.running:
            if group not in self._live and in_autograd() and torch.is_grad_enabled():
                # Recomputed by reentrant checkpointing: backward enters it next.
                self._hold_for_backward(group)
            if group in self._live:
                self._hide_in_backward(group)
            else:
                self._prefetcher.release(group, raised=raised)

    def _enter(self) -> None:
        self._saved.enter()
        self._forwards.append(_Forward())
        if self.state is PassState.IDLE:
            self._pass.to_forward()

    def _leave(self, *, raised: bool) -> None:
        """The forward that is ending needs what it has borrowed no more."""
        self._saved.leave()
        if self._forwards:
            ended = self._forwards.pop()
            for group in (*ended.borrowed, *ended.early):
                self._stop_using(group, raised=raised)
        if self.state is PassState.FORWARD and not self._forwards:
            self._pass.to_idle()

    def _end_early(self, group: ParamGroup) -> None:
        """``group`` is called: what unsharded it early needs it no more."""
        for forward in self._forwards:
            while group in forward.early:
                forward.early.remove(group)
                self._stop_using(group, raised=False)

    def _hold_for_backward(self, group: ParamGroup) -> None:
        if group not in self._live:
            self._live.append(group)
            there = group.residency in (Residency.RESIDENT, Residency.UNSHARDED)
            if not self._progress[group].running and (not there or self._prefetcher.keeps(group)):
                self._acquire(group)
            if any(is_compiled(entry) for entry in group.entries):
                group.show()
            if self._timeline.recording:
                self._timeline.begin("compute", f"backward {group.name}")

    def _make_room_and_hold(self, group: ParamGroup) -> None:
        """Hold ``group``, and let go of what its reader does not need only if there is no room beside it.

        The function that reads may keep views of that by itself, of which nothing tells.
        """
        try:
            self._hold_for_backward(group)
        except ResidencyError:
            self._live.remove(group)
            self._finish_unrelated(group)
            self._hold_for_backward(group)

    def _hide_in_backward(self, group: ParamGroup) -> None:
        """``group`` is held for backward, which works on saved tensors.

        Not if it was compiled: what a custom function keeps by itself, compiled code reads without asking anybody.
        """
        if not any(is_compiled(entry) for entry in group.entries):
            group.hide()

    def _drop_fresh_gradients(self) -> None:
        """What autograd has put on parameters and nobody has taken: the next backward would add to it."""
        for group in self._progress:
            for param in group.params:
                resharded.take_gradient(param)

    def _finish_unrelated(self, group: ParamGroup, *, left: bool = False) -> None:
        """Finish the live groups that neither enclose ``group`` nor lie inside of it."""
        around = self._progress[group].enclosing | self._saved.in_use() | self._until_end
        inside = [other for other in self._live if group in self._progress[other].enclosing]
        for other in [live for live in self._live if live not in around and live not in inside]:
            # A node of its own forward that recomputes others (several blocks in one checkpoint) goes on afterwards.
            self._finish(other, left=left, entered=left and not self._recomputes_itself(other))

    def _reset(self) -> None:
        """The pass is over, but for modules whose forward has run a backward and goes on."""
        if self.state is not PassState.CLOSED:
            self._pass.to_idle()
            if self._forwards:
                self._pass.to_forward()
        for progress in self._progress.values():
            progress.reset()
        self._used.clear()
        self._stepped.clear()

    def _finish(self, group: ParamGroup, *, left: bool = False, entered: bool = False) -> None:
        """``group`` is not used by what comes next; ``left``: backward is in another one.

        ``entered``: it has done with ``group``, unless there are further forwards of it to go through.
        """
        if self._timeline.recording:
            self._timeline.end("compute", f"backward {group.name}")
        self._live.remove(group)
        step = left and self.state is PassState.STEPPING and self._is_final(group)
        progress = self._progress[group]
        if step:
            self._stepped.add(group)
        elif group not in self._stepped:
            through = entered and progress.entered >= max(1, progress.graphs)
            self._gradients.close(group, last=through or progress.arrived == progress.expected > 0)
        if not progress.running:
            self._prefetcher.release(group)
        self._on_group_done(group, step)

    def _is_final(self, group: ParamGroup) -> bool:
        """Whether no gradient of ``group`` can come any more: see Note [When is a gradient final]."""
        progress = self._progress[group]
        whole = progress.arrived == progress.expected
        used = progress.forwards > 1 or progress.running or group in self._stepped
        return whole and not used and not progress.gathered

    def _check_not_stepped(self, group: ParamGroup) -> None:
        if group in self._stepped and self._progress[group].expected:
            raise EngineStateError(
                f"parameters of group {group.name!r} are read by a recomputation after step_in_backward had updated"
                " them: it would not be the forward that it repeats. Set tiering.step_in_backward to false"
            )


def _nothing() -> None:
    return None


@dataclass(slots=True)
class _Progress:
    """How far the pass is with a group.

    ``enclosing`` are the groups around it, ``expected`` is the number of its parameters that are trained. ``running``
    forwards use the group now; ``called`` says whether any did since an exception last ended a pass. All others count
    since the last backward.
    """

    enclosing: frozenset[ParamGroup]
    expected: int
    running: int = 0
    called: bool = False
    forwards: int = 0
    graphs: int = 0  # of the forwards, those that backward can enter
    entered: int = 0  # of the graphs, those that backward has entered
    arrived: int = 0  # gradients in this backward
    gathered: bool = False  # lent by gathered() to what autograd records

    def reset(self) -> None:
        self.forwards = self.graphs = self.entered = self.arrived = 0
        self.gathered = False


class _Forward:
    """A module that is running: the groups that it reads without being one of their entries.

    ``early``: those that it will call, and that were unsharded before.
    """

    def __init__(self) -> None:
        self.borrowed: list[ParamGroup] = []
        self.early: list[ParamGroup] = []
        self.first_node = next_node()
        self.with_grad = torch.is_grad_enabled()


def _trained(group: ParamGroup) -> int:
    return sum(piece.trainable for piece in group.layout.pieces)


def _enclosing(group: ParamGroup, groups: list[ParamGroup]) -> frozenset[ParamGroup]:
    """The groups around ``group``, innermost first to the root."""
    around = set()
    while group.parent is not None:
        group = groups[group.parent]
        around.add(group)
    return frozenset(around)
