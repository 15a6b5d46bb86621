"""Prefetch: the order in which a pass uses groups is recorded once, then read ahead as far as there is room.

A pass is one forward, with its backward when there is one; passes with and without gradients have separate orders.
`tiering.storage.read_ahead` decides which group is fetched or dropped. Prefetch never fails, and waits only for a
deferred step of several ranks: it uses free room, and an I/O error that it meets is raised for the next group that
compute needs. A pass that leaves the recorded order only stalls; the next pass follows the new order.

Note [Gathers that all ranks expect]
    Groups that are sharded over ranks must be gathered in one order everywhere (see gathered_storage.py), or a rank
    would receive another group's bytes. All ranks have recorded the same orders, so a rank fetches and gathers the next
    groups of the order without communication. A rank that does anything else (it leaves the order, ends a pass early,
    or changes from training to evaluation) first proposes this to the other ranks, and prefetches nothing until they
    agree. A rank that has not read the proposal waits for another gather, until it looks for the reason: see peers.py.

Note [Experts are not foreseen]
    The experts that a pass uses depend on its tokens. So they are fetched when they are called, and leave the recorded
    order as it is. Fetches ahead leave room for one expert, which therefore drops nothing that was read. Experts of
    which two passes in a row have used all, as with many tokens, are fetched ahead like other groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tiering.errors import SwapError
from tiering.storage.read_ahead import FetchAhead
from zero3.params.grouping import Routing
from zero3.params.param_group import ParamGroup, Residency


class Room(Protocol):
    """Leased room."""

    def release(self) -> object: ...


class Update(Protocol):
    """Applies a deferred step to a group. Returns False if bytes have not arrived, unless ``wait`` is set."""

    def __call__(self, group: ParamGroup, *, wait: bool) -> bool: ...


def no_update(group: ParamGroup, *, wait: bool) -> bool:
    """No step is deferred."""
    return True


class _Fetcher:
    """Unshards and reshards one group; gathers groups that were fetched ahead when their shards have arrived.

    ``spare`` leases the room that fetches ahead leave for an expert: None if there is no such room now.
    """

    def __init__(self, spare: Callable[[], Room | None] | None, update: Update) -> None:
        self._spare = spare
        self.update = update
        self.error: SwapError | None = None  # of a fetch ahead, not raised yet
        self.retained: set[ParamGroup] = set()  # groups ahead that stay since their last use
        self._ungathered: deque[ParamGroup] = deque()  # groups ahead that are sharded and not gathered

    def is_fetched(self, group: ParamGroup) -> bool:
        return group.residency is not Residency.SHARDED

    def fetch(self, group: ParamGroup, *, wait: bool) -> bool:
        if self._window_is_full(group):
            return False
        # Until then, its bytes at home are those of the step before. When they arrive differs between ranks, but all
        # ranks must fetch the same groups ahead: with several, prefetch waits here.
        return self.update(group, wait=wait or group.sharded) and group.unshard(wait=wait)

    def fetch_ahead(self, group: ParamGroup) -> bool:
        spared = None
        if self._spare is not None and group.routing is None:
            spared = self._spare()
            if spared is None:
                return False
        try:
            if not self.fetch(group, wait=False):
                return False
        except SwapError as error:
            self.error = error
            return False
        finally:
            if spared is not None:
                spared.release()
        # Only once its read has begun: ``gather_ahead`` gathers what is in this queue, in its order.
        if group.sharded:
            self._ungathered.append(group)
        return True

    def reads_through_window(self, group: ParamGroup) -> bool:
        return group.through_window

    def drop(self, group: ParamGroup) -> None:
        # First: gather_ahead must not begin to gather a group that has no room.
        self._forget_gather(group)
        self.retained.discard(group)
        group.reshard()

    def gather(self, group: ParamGroup, *, foreseen: bool) -> None:
        """Start to gather a group that is needed now."""
        self._forget_gather(group)
        group.gather(foreseen=foreseen)

    def gather_ahead(self) -> None:
        """Start to gather the groups ahead whose shards have arrived."""
        # The last group's bytes may still be in flight: it is gathered when there is another group behind it, or at
        # its use.
        while self._ungathered and (len(self._ungathered) > 1 or not self._ungathered[0].reads_first):
            try:
                self._ungathered.popleft().gather(foreseen=True)
            except SwapError as error:
                self.error = error
                return

    def _window_is_full(self, group: ParamGroup) -> bool:
        """Whether ``group`` would wait for room that only gathers free: the window holds two groups' shards."""
        return group.sharded and group.through_window and len(self._ungathered) > 1

    def _forget_gather(self, group: ParamGroup) -> None:
        if group in self._ungathered:
            self._ungathered.remove(group)


class Prefetcher:
    """Unshards groups on demand and ahead of it.

    ``agree`` waits until all ranks are about to do the same. It is None if no group is sharded over ranks. ``spare``
    leases room for an expert for a moment; it is None if no expert moves. ``before_pass`` is called at the begin of
    each pass, and raises if groups cannot be read. ``update`` completes a group before it is read.
    """

    def __init__(
        self,
        agree: Callable[[str], None] | None = None,
        spare: Callable[[], Room | None] | None = None,
        before_pass: Sequence[Callable[[], None]] = (),
        update: Update = no_update,
    ) -> None:
        self._agree = agree
        self._before_pass = before_pass
        # With gradients? -> the experts of which the last pass used all; and those of which the next one probably does.
        self._busy: dict[bool, set[Routing]] = {}
        self._certain: dict[bool, set[Routing]] = {}
        self._orders: dict[bool, list[ParamGroup]] = {}  # with gradients? -> the last full pass
        self._trace: list[ParamGroup] = []
        self._training = True
        self._fetcher = _Fetcher(spare, update)
        self._ahead = FetchAhead[ParamGroup](self._fetcher)
        self._in_doubt = False  # whether other ranks may expect another group next

    def begin_pass(self, training: bool) -> None:
        """A forward begins. The trace of the pass before becomes the order of its kind."""
        for call in self._before_pass:
            call()
        # Before end_pass, which expects the new order from its beginning.
        self._doubt_unless_complete()
        self.end_pass()
        if training is not self._training:
            self._ahead.drop_all()
            self._doubt()
        self._training = training
        self._follow_order()

    def end_pass(self) -> None:
        """The pass that was recorded is complete."""
        if self._trace:
            self._orders[self._training] = self._foreseen(self._trace)
            self._trace = []
            self._follow_order()

    def _foreseen(self, trace: list[ParamGroup]) -> list[ParamGroup]:
        """The groups of a pass that the next one probably uses. See Note [Experts are not foreseen]."""
        used = Counter(group.routing for group in dict.fromkeys(trace))
        busy = {experts for experts, count in used.items() if experts is not None and count == experts.count}
        certain = busy & self._busy.get(self._training, set())
        self._busy[self._training], self._certain[self._training] = busy, certain
        for group in [group for group in self._ahead if group.routing and group.routing not in certain]:
            # Fetched ahead and not used: it would hold its room during the next pass.
            self._ahead.drop(group)
        return [group for group in trace if group.routing is None or group.routing in certain]

    def acquire(self, group: ParamGroup) -> None:
        """Make ``group`` usable now, and start to fetch the groups after it."""
        if group.residency is Residency.RESIDENT:
            return
        if self._fetcher.error is not None:
            # Of a fetch ahead, which raises nothing itself. Cleared first, so that it is raised once.
            error, self._fetcher.error = self._fetcher.error, None
            raise error
        self._fetcher.update(group, wait=True)
        self._trace.append(group)
        expected = self._ahead.next
        certain = group.routing is None or group.routing in self._certain.get(self._training, ())
        # An expert that was not foreseen does not change what comes next.
        foreseen = certain and self._ahead.advance(group) and not self._in_doubt
        if group.sharded:
            self._in_doubt = False  # from the agreement below on
        if group in self._fetcher.retained:
            self._fetcher.retained.remove(group)
            if group.sharded:
                group.spare()
        self._ahead.use(group)
        # Before look_ahead, which may begin gathers of later groups: every rank begins this one first.
        if group.sharded:
            self._gather(group, expected, foreseen=foreseen)
        # Before the wait: the next groups are read meanwhile.
        self.look_ahead()
        # Its bytes may still be in flight. After this, they are valid for compute.
        group.wait_for_unshard()
        # Once more: the read has left the window, which has room for another one.
        self.look_ahead()

    def begin(self, group: ParamGroup) -> bool:
        """Start to fetch ``group``, which is needed now; False if that needs the room of other groups."""
        self._fetcher.update(group, wait=True)
        return self._fetcher.is_fetched(group) or self._fetcher.fetch(group, wait=False)

    def keeps(self, group: ParamGroup) -> bool:
        """Whether ``group`` stays unsharded since its last use, until another group needs the room."""
        return group in self._fetcher.retained

    def release(self, group: ParamGroup, *, raised: bool = False) -> None:
        """``group`` is not in use now; ``raised``: an exception has ended its use, on this rank."""
        if group.residency is Residency.RESIDENT:
            return
        if group.stays and not raised and not self._in_doubt and self._ahead.keep(group):
            group.hide()
            self._fetcher.retained.add(group)
        else:
            group.reshard()
        # The other ranks have met no exception: they may be about to use another group.
        if raised and group.sharded:
            self._in_doubt = True
        self.look_ahead()

    def look_ahead(self) -> None:
        """Start to fetch the next groups, as far as there is room; copy groups that were read to the device."""
        try:
            for group in self._ahead:
                if group.through_window:
                    group.advance()
        except SwapError as error:
            self._fetcher.error = error
            return
        # A gather that the other ranks do not expect would receive the bytes of another group.
        if self._ahead.cursor is None or self._in_doubt:
            return
        self._ahead.look_ahead()
        self._fetcher.gather_ahead()

    def drop(self, group: ParamGroup) -> None:
        """Drop ``group`` if it was fetched ahead: its bytes at home are about to change."""
        for each in (group, *group.slices):
            self._ahead.drop(each)

    def forget(self) -> None:
        """Drop all groups ahead: the parameters are about to change, or a pass was abandoned."""
        # First: below, the order is expected from its beginning again.
        self._doubt_unless_complete()
        self._ahead.drop_all()
        # Of a group that is fetched again, and fails again if its bytes are still lost.
        self._fetcher.error = None
        self._trace = []
        self._follow_order()

    def _follow_order(self) -> None:
        """Expect a pass of the current kind, from its beginning."""
        self._ahead.follow(self._orders.get(self._training, ()))

    def _gather(self, group: ParamGroup, expected: ParamGroup | None, *, foreseen: bool) -> None:
        """Gather a group that is needed now, unless its gather has begun."""
        if not group.gathered:
            self._fetcher.gather(group, foreseen=foreseen)
        elif not foreseen:
            assert self._agree is not None
            instead = f" while {expected.name!r} was expected" if expected not in (None, group) else ""
            self._agree(f"use {group.name!r}{instead}")

    def _doubt_unless_complete(self) -> None:
        """A pass that ends before the end of its order has a cause that other ranks need not have met."""
        if self._ahead.cursor is None or 0 < self._ahead.cursor < len(self._ahead.order):
            self._doubt()

    def _doubt(self) -> None:
        """Other ranks may expect another group next. Only the next gather ends the doubt, so that it needs one."""
        self._in_doubt = self._agree is not None
