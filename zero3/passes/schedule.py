"""The pass schedule: it decides when each group is unsharded, and when the group's gradients are complete.

An event moves groups in several steps. Methods with ``@uninterrupted`` defer Ctrl-C until the groups are consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tiering._interrupts import deferred_interrupts, uninterrupted
from tiering.errors import ArenaError, EngineStateError, ResidencyError
from zero3.device.timeline import Timeline
from zero3.params import resharded
from zero3.params.compilation import is_compiled
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup, Residency
from zero3.passes.hooks import call_at_end_of_backward, check_transform
from zero3.passes.moved_activations import MovedActivations
from zero3.passes.pass_state import (
    CurrentPass,
    GroupsInPass,
    PassState,
    PassThread,
    RowsInBackward,
    RunningForward,
    check_backward,
    in_autograd,
)
from zero3.passes.prefetch import Prefetcher
from zero3.passes.receivers import GradientSink, PassListener
from zero3.passes.room_for_groups import RoomForGroups
from zero3.passes.saved_tensors import Activations, SavedTensors


class PassSchedule:
    """Receives the events of the hooks (see hooks.Events), and moves ``groups`` and their gradients accordingly.

    Raises EngineStateError for calls that the state of the pass does not allow, and ResidencyError if a group does not
    fit on the device.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        prefetcher: Prefetcher,
        gradients: GradientSink,
        listener: PassListener,
        timeline: Timeline | None = None,
        moved: MovedActivations | None = None,
    ) -> None:
        self._prefetcher = prefetcher
        self._gradients = gradients
        self._listener = listener
        self._timeline = timeline or Timeline()
        self._pass = CurrentPass()
        self._groups = GroupsInPass(groups)
        self._rows: RowsInBackward | None = None  # while backward goes through chunks of rows
        self._moved = moved
        self._saved = SavedTensors(groups, self.need, self._groups.stepped, moved)
        self._thread = PassThread()
        end_use = partial(self._stop_using, raised=False, holds=False)
        self._room = RoomForGroups(prefetcher, self._groups, end_use)

    @property
    def state(self) -> PassState:
        """The state of the current pass."""
        return self._pass.state

    @property
    def takes_parts(self) -> bool:
        """Whether the gradient of a tied parameter is accumulated part by part."""
        return self._gradients.takes_parts

    @property
    def activations(self) -> Activations:
        """The memory that autograd keeps for backward, which no tier counts."""
        return self._saved.activations

    @uninterrupted
    def begin_forward(self, training: bool, *, whole: bool = True) -> None:
        """A module outside of the blocks is called: the ``whole`` model, or a part of it.

        The outermost call begins a pass. ``training``: gradients are enabled.
        """
        self.check_thread()
        if not in_autograd():
            if self.state.in_backward:
                # The user's own loss.backward() ended with an exception, which no code of the engine saw. Its groups go
                # before its gradients: abandon() takes .grad off the parameters, reset() drops the accumulated values.
                self.abandon()
                self._gradients.reset()
            elif whole and self._groups.forwards:
                # A model does not call itself, so an exception ended the forward that seems to run.
                self.abandon()
            if not self._groups.forwards:
                self._prefetcher.begin_pass(training)
                if self._moved is not None:
                    self._moved.begin_pass()
        self._enter()

    @uninterrupted
    def end_forward(self, *, raised: bool = False) -> None:
        """The module of the last ``begin_forward`` has returned, or ``raised``."""
        self._leave(raised=raised)

    @uninterrupted
    def unshard_early(self, group: ParamGroup) -> None:
        """The module of the last ``begin_forward`` reads ``group`` before it calls it.

        The group takes no more memory than that call needs. It is released when the call ends, or with the module if
        the module does not call it.
        """
        # Noted first: if the use raises, the end of the module takes it back.
        self._groups.forwards[-1].early.append(group)
        self._use(group)

    @uninterrupted
    def pre_forward(self, group: ParamGroup) -> None:
        """An entry of ``group`` is called: unshard the group. Compute runs after the copy of its bytes."""
        self.check_thread()
        self._groups.check_not_stepped(group)
        # Before the group is acquired: if that raises, the except branch below leaves the group again.
        self._enter()
        self._groups.count_forward(group)
        try:
            self._use(group)
        except BaseException:
            self._leave(raised=True)
            self._stop_using(group, raised=True)
            raise
        # Only now: _use has counted this call, so the early use ends without a release in between.
        self._end_early(group)
        if self._timeline.recording:
            self._timeline.begin("compute", f"forward {group.name}")

    @uninterrupted
    def post_forward(self, group: ParamGroup, *, raised: bool = False) -> None:
        """An entry of ``group`` has returned, or ``raised``: reshard the group unless something else uses it."""
        if self._timeline.recording:
            self._timeline.end("compute", f"forward {group.name}")
        self._leave(raised=raised)
        self._stop_using(group, raised=raised)

    @uninterrupted
    def borrow(self, group: ParamGroup, *, trained: bool = True) -> bool:
        """A forward reads a parameter of ``group`` without being one of its entries. Returns False if none runs.

        ``trained``: steps change the parameter. The group stays on the device until that forward ends. See Note [A
        resharded parameter points nowhere].
        """
        if trained:
            self._groups.check_not_stepped(group)
        check_transform(group)
        if self._groups.forwards:
            if not in_autograd():
                self._groups.progress[group].count_read()
            # Noted first, as an early use is.
            self._groups.forwards[-1].borrowed.append(group)
            self._use(group)
            return True
        if in_autograd():
            self.begin_backward()
            if group.routing is not None:
                # Backward computes with one expert after the other, too.
                self._finish_unrelated(group)
            self._make_room_and_hold(group)
            group.show()
            if torch.is_grad_enabled() and not self._groups.recomputes_itself(group):
                # A function that is recomputed outside of every module reads it. No event reports the end of its graph.
                self._groups.until_end.add(group)
            return True
        return False

    @uninterrupted
    def begin_use(self, groups: Collection[ParamGroup]) -> None:
        """Code calls the modules of ``groups`` many times until ``end_forward``: they stay on the device meanwhile.

        In a forward, or between passes, and in the backward of what was computed there.
        """
        self.check_thread()
        if in_autograd():
            # A backward may begin there. Its end must not be that of a backward inside of it.
            self.begin_backward()
            for group in groups:
                self._groups.progress[group].entered += 1
        self._enter()
        forward = self._groups.forwards[-1]
        try:
            for group in groups:
                self._groups.count_forward(group)
                forward.counted.append(group)
                # Noted first, as an early use is.
                forward.borrowed.append(group)
                self._use(group)
        except BaseException:
            self._leave(raised=True)
            raise

    @uninterrupted
    def begin_backward(self) -> None:
        """A gradient has reached an output of the model or of a group. Further calls in the same pass do nothing.

        Raises EngineStateError: the engine is closed, create_graph=True is set, or compiled autograd runs.
        """
        if not self.state.in_backward:
            check_backward(self.state, moves=bool(self._saved.owners))
            # The engine first: if it cannot complete the last step, this backward has not begun, and the gradients are
            # still those of that step. It sets whether this is the last micro-batch, and the sink's begin reads that.
            # With several ranks, begin sends a row, so all ranks must reach it with the same answer.
            self._listener.on_backward()
            self._pass.to_backward()
            self._thread.begin_backward(call_at_end_of_backward(self.end_of_backward))
            self._gradients.begin(self._groups.used)

    def forward_nodes(self) -> range:
        """The sequence numbers of the autograd nodes that the innermost running forward has made so far."""
        return self._groups.forward_nodes()

    @uninterrupted
    def pre_backward(self, group: ParamGroup, nodes: range = range(0)) -> None:
        """Backward reaches the output of a forward of ``group``, which made ``nodes``.

        Groups that do not enclose ``group`` are done: see Note [When is a group done in backward].
        """
        self.begin_backward()
        # First release, then acquire: the plan has room for one block and the groups around it, not for two blocks.
        for done in self._groups.enter(group, nodes):
            self._finish(done, has_left=True, entered=True)
        self._hold_for_backward(group)

    def need(self, group: ParamGroup) -> None:
        """Backward is about to read a saved tensor of ``group``. See Note [Backward enters a group from anywhere]."""
        if group in self._groups.live or self._groups.progress[group].running:
            return
        if not in_autograd():
            raise EngineStateError(
                f"a tensor that autograd saved from group {group.name!r} was read outside of backward, where the group"
                " is not unsharded; read it inside of the module's forward"
            )
        # Not for the whole method, which is called for each saved tensor and returns above for most.
        with deferred_interrupts():
            self.begin_backward()
            self._finish_unrelated(group)
            self._hold_for_backward(group)

    @uninterrupted
    def gradient(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Autograd has accumulated ``param.grad``: pass it to the sink."""
        self._begin_receiving()
        if self._rows is None or self._rows.completes(group, self._groups.progress[group]):
            self._groups.progress[group].arrived += 1
        self._gradients.accumulate(group, piece, param)
        # After accumulate: the sink may begin to reduce the group's buffer at once.
        if self._groups.is_final(group):
            self._gradients.final(group)
        self._listener.on_gradient()

    @uninterrupted
    def gradient_part(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """A part of a tied parameter's gradient is in ``param.grad``. More parts may follow.

        So it does not count as arrived: the group's gradients are final when backward ends.
        """
        self._begin_receiving()
        self._gradients.accumulate(group, piece, param)

    @contextmanager
    def rows(self, groups: Sequence[ParamGroup]) -> Iterator[Callable[[bool], None]]:
        """Backward goes through a block chunk by chunk of its rows (see row_chunks.py), with ``groups`` on the device.

        Yields a function to call before each chunk, with whether it is the last one: only then gradients are final.
        """
        with ExitStack() as uses:
            self.begin_backward()
            for group in groups:
                self.pre_forward(group)
                uses.push(partial(self._end_rows, group))
            self._rows = rows = RowsInBackward(frozenset(groups))
            uses.callback(setattr, self, "_rows", None)
            yield rows.begin_chunk
        for group in groups:
            if self._groups.is_final(group):
                self._gradients.final(group)

    def _end_rows(self, group: ParamGroup, error: type[BaseException] | None, *_: object) -> None:
        self.post_forward(group, raised=error is not None)

    @uninterrupted
    def end_of_backward(self) -> None:
        """Every gradient of this pass has arrived. Autograd calls this on the thread that called backward."""
        if not self.state.in_backward:
            return
        received = self.state is not PassState.BACKWARD  # before _reset changes the state
        self._groups.end_backward()
        for group in list(self._groups.live):
            self._finish(group, has_left=True)
        # After close() of each group: with several ranks this waits for all reductions that close() has begun.
        self._gradients.close_all()
        self._saved.end_of_backward()
        if self._moved is not None:
            self._moved.end_backward()
        self._reset()
        # After the last release, so that the prefetch continues with the beginning of the next pass.
        self._prefetcher.end_pass()
        if received or self._gradients.received_elsewhere:
            # On every rank if any rank got a gradient, so that all ranks agree that step() is due.
            self._listener.on_end_of_backward()

    @uninterrupted
    def abandon(self) -> None:
        """An exception ended the pass: release its groups, so that the next pass starts clean."""
        if self.state.in_backward:
            self._drop_fresh_gradients()
        for group in self._groups.on_device():
            if self._timeline.recording:
                self._timeline.end("compute", f"backward {group.name}")
            group.reshard(keep_edits=False)  # edits of a pass that failed are dropped
        self._groups.abandon()
        self._saved.leave_all()
        self._saved.end_of_backward()
        self._reset()
        self._prefetcher.forget()

    def gathers(self, group: ParamGroup) -> None:
        """gathered() shows parameters of ``group`` outside of its forwards: graphs that begin there bring gradients."""
        if torch.is_grad_enabled() and not in_autograd():
            self._groups.progress[group].gathered = True

    def saving(self) -> AbstractContextManager[Any]:
        """The engine's hooks for saved tensors, for use outside of a pass."""
        return self._saved.hooks()

    def close(self) -> None:
        """End the last pass. No pass may begin afterwards."""
        self.abandon()
        self._pass.to_closed()

    def _begin_receiving(self) -> None:
        """A parameter has a gradient. On the first one, the engine decides whether this backward updates parameters."""
        self.begin_backward()
        if self.state is PassState.BACKWARD:
            self._pass.to_accumulating()
            if self._listener.on_first_gradient():
                self._pass.to_stepping()

    def check_thread(self) -> None:
        """EngineStateError in a thread other than that of the running pass. Autograd's threads may recompute."""
        if not in_autograd():
            forward_runs = bool(self._groups.forwards and self._saved.owners)
            self._thread.claim(backward_runs=self.state.in_backward, forward_runs=forward_runs)

    def _use(self, group: ParamGroup) -> None:
        """Count one more use of ``group`` by a forward, and unshard it for the first one."""
        progress = self._groups.progress[group]
        progress.running, progress.called = progress.running + 1, True
        if progress.running == 1 and group not in self._groups.live:
            # A recomputation under checkpointing: make room first, as pre_backward does.
            if self.state.in_backward:
                self._finish_unrelated(group, has_left=True)
            self._acquire(group)
        group.show()

    def _acquire(self, group: ParamGroup) -> None:
        """Unshard ``group``. ResidencyError if groups that are in use leave no room for it."""
        # Experts that the module has computed with make way before groups that were fetched ahead.
        if group.routing is not None and not self._prefetcher.begin(group):
            self._room.end_borrowing(but=group, only_experts=True)
        try:
            self._prefetcher.acquire(group)
        except ArenaError as error:
            if self._room.acquire_with_neighbour(group):
                return None
            if self._room.end_borrowing(but=group):
                return self._acquire(group)
            raise self._room.refusal(group) from error

    def _stop_using(self, group: ParamGroup, *, raised: bool, holds: bool = True) -> None:
        """Count one use of ``group`` less. The last one releases the group, or leaves it to backward.

        Without ``holds``, a group that is only used in a recomputation is released, too: others need its room.
        """
        progress = self._groups.progress[group]
        if not progress.running:
            return  # abandon() has ended the pass, and released the group, while the forward still ran
        progress.running -= 1
        if not progress.running:
            if holds and group not in self._groups.live and in_autograd() and torch.is_grad_enabled():
                # Reentrant checkpointing recomputed it, and backward enters it next: a release would fetch it twice.
                self._hold_for_backward(group)
            if group in self._groups.live:
                self._hide_in_backward(group)
            else:
                self._prefetcher.release(group, raised=raised)

    def _enter(self) -> None:
        self._saved.enter()
        self._groups.forwards.append(RunningForward())
        if self.state is PassState.IDLE:
            self._pass.to_forward()

    def _leave(self, *, raised: bool) -> None:
        """The innermost forward ends: release the groups that it borrowed or unsharded early."""
        # In the reverse order of ``_enter``.
        self._saved.leave()
        if self._groups.forwards:
            forward = self._groups.forwards.pop()
            for group in (*forward.borrowed, *forward.early):
                self._stop_using(group, raised=raised)
        if self.state is PassState.FORWARD and not self._groups.forwards:
            self._pass.to_idle()

    def _end_early(self, group: ParamGroup) -> None:
        """``group`` is called: its early use ends."""
        for forward in self._groups.forwards:
            while group in forward.early:
                forward.early.remove(group)
                self._stop_using(group, raised=False)

    def _hold_for_backward(self, group: ParamGroup) -> None:
        """Keep ``group`` on the device until backward is done with it."""
        if group not in self._groups.live:
            self._groups.live.append(group)
            on_device = group.residency in (Residency.RESIDENT, Residency.UNSHARDED)
            # A group that the prefetcher keeps since its last use is on the device, but could be dropped for room.
            if not self._groups.progress[group].running and (not on_device or self._prefetcher.keeps(group)):
                self._acquire(group)
            # Compiled code reads saved parameters without the hooks of saved_tensors.py, so they must show their bytes.
            if any(is_compiled(entry) for entry in group.entries):
                group.show()
            if self._timeline.recording:
                self._timeline.begin("compute", f"backward {group.name}")

    def _make_room_and_hold(self, group: ParamGroup) -> None:
        """Hold ``group``, and finish unrelated groups only if it does not fit.

        The function that reads ``group`` may keep views of the unrelated groups, which no event reports.
        """
        try:
            self._hold_for_backward(group)
        except ResidencyError:
            self._groups.live.remove(group)
            self._finish_unrelated(group)
            self._hold_for_backward(group)

    def _hide_in_backward(self, group: ParamGroup) -> None:
        """Hide the parameters of ``group``: backward reads its bytes through saved tensors only.

        Not in compiled code, which reads tensors that a custom function keeps without any hook.
        """
        if not any(is_compiled(entry) for entry in group.entries):
            group.hide()

    def _drop_fresh_gradients(self) -> None:
        """Clear ``.grad`` of all parameters: the next backward would add to gradients of an abandoned one."""
        for group in self._groups.progress:
            for param in group.params:
                resharded.take_gradient(param)

    def _finish_unrelated(self, group: ParamGroup, *, has_left: bool = False) -> None:
        """Finish the live groups that neither enclose ``group`` nor lie inside of it."""
        # The node that runs now may hold saved tensors of other groups: their bytes must stay until it ends.
        for done in self._groups.unrelated(group, self._saved.in_use()):
            # A node of the group's own forward that recomputes several blocks (one checkpoint) continues afterwards.
            self._finish(
                done, has_left=has_left, entered=has_left and not self._groups.recomputes_itself(done)
            )

    def _reset(self) -> None:
        """The pass has ended, except for modules whose forward ran a backward and continues."""
        if self.state is not PassState.CLOSED:
            self._pass.to_idle()
            if self._groups.forwards:
                self._pass.to_forward()
        self._groups.reset()

    def _finish(self, group: ParamGroup, *, has_left: bool = False, entered: bool = False) -> None:
        """Release ``group``, which the next nodes do not use. ``has_left``: backward is in another group.

        ``entered``: backward is done with ``group``, unless it has further forwards to go through.
        """
        if self._timeline.recording:
            self._timeline.end("compute", f"backward {group.name}")
        self._groups.live.remove(group)
        step = has_left and self.state is PassState.STEPPING and self._groups.is_final(group)
        progress = self._groups.progress[group]
        if step:
            self._groups.stepped.add(group)
        elif group not in self._groups.stepped:
            self._gradients.close(group, last=progress.is_over(entered=entered))
        # Before the callback, which may update the group at home: an unsharded copy would keep the old values.
        if not progress.running:
            self._prefetcher.release(group)
        self._listener.on_group_done(group, step)
