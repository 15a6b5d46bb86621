"""Room on the device for a group that does not fit beside those that are there: which of them make way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.errors import ArenaError, ResidencyError
from zero3.device.storages import can_close
from zero3.params.param_group import ParamGroup, Residency
from zero3.passes.pass_state import GroupsInPass
from zero3.passes.prefetch import Prefetcher


class RoomForGroups:
    """Makes room for ``groups``. ``end_use`` counts one use of a group less, and releases it after the last one."""

    def __init__(
        self, prefetcher: Prefetcher, groups: GroupsInPass, end_use: Callable[[ParamGroup], None]
    ) -> None:
        self._prefetcher = prefetcher
        self._groups = groups
        self._end_use = end_use

    def acquire_with_neighbour(self, group: ParamGroup) -> bool:
        """Unshard ``group`` after the group beside it has made way. Returns False if that one holds no room.

        The plan has room for both, but the other one may lie in the middle of it. Both are fetched anew, the larger one
        first: then the rest of the room is in one piece. Also False if borrowed groups hold the room of both; then the
        other one is back if it is in use.
        """
        neighbour = self._groups.progress[group].beside
        if neighbour is None or neighbour.residency in (Residency.RESIDENT, Residency.SHARDED):
            return False
        was_shown = neighbour.is_shown
        neighbour.reshard()
        both = sorted((group, neighbour), key=lambda each: -each.layout.numel)
        fit = self._acquire(both)
        if not fit and self.end_borrowing(but=group):
            # The neighbour may have been borrowed, too: then nothing uses it now.
            fit = self._acquire(both if self._groups.is_in_use(neighbour) else [group])
        if not fit and self._groups.is_in_use(neighbour):
            self._bring_back(neighbour, instead_of=group)
        if was_shown and neighbour.residency is Residency.UNSHARDED:
            neighbour.show()
        return fit

    def _bring_back(self, neighbour: ParamGroup, *, instead_of: ParamGroup) -> None:
        """Unshard a group in use again, as it was: a program may go on after the refusal of the other one."""
        if instead_of.residency is not Residency.SHARDED:
            instead_of.reshard()
        if neighbour.residency is Residency.SHARDED:
            self._prefetcher.acquire(neighbour)

    def _acquire(self, groups: Sequence[ParamGroup]) -> bool:
        """Unshard ``groups``. Returns False, after some of them, if there is no room."""
        try:
            for group in groups:
                self._prefetcher.acquire(group)
        except ArenaError:
            return False
        return True

    def end_borrowing(self, *, but: ParamGroup, only_experts: bool = False) -> bool:
        """Release the groups that running modules have borrowed, except ``but``. Returns False if there were none.

        Experts first, alone if there are any: a module computes with one after the other. ``only_experts``: other
        experts than that of ``but``.

        Most modules that borrow a parameter need it only for a moment: a hook that logs a norm, for example. A view
        that is used later cannot be read any more. So this is done only where storages can be closed: there such a
        read raises, elsewhere it would return wrong values.
        """
        forwards = self._groups.forwards if can_close() else []
        kept = {but, *but.same_expert} if only_experts else {but}
        releasable = {group for forward in forwards for group in forward.borrowed if group not in kept}
        experts = {group for group in releasable if group.routing is not None}
        releasable = experts if experts or only_experts else releasable
        for forward in forwards:
            ended = [group for group in forward.borrowed if group in releasable]
            forward.borrowed = [group for group in forward.borrowed if group not in releasable]
            for group in ended:
                self._end_use(group)
        return bool(releasable)

    def refusal(self, group: ParamGroup) -> ResidencyError:
        """The error for a ``group`` for which nothing can make way."""
        names_in_use = [
            used.name for used in self._groups.progress if used is not group and self._groups.is_in_use(used)
        ]
        if group.slices:
            return ResidencyError(
                f"no room on the device for all experts of {group.name!r} at once: {group.layout.pieces[0].name!r}"
                " is read as a whole, but its experts are fetched one by one. Read it by expert, or name the module"
                " in leaf_module: then its block is fetched as a whole"
            )
        return ResidencyError(
            f"no room on the device for group {group.name!r} in addition to {names_in_use}, which are in use. The"
            " plan has room for one block and the groups around it; a module that reads parameters of another"
            " module, or calls a block from inside a block, needs more: raise device_budget, or"
            " stage3_prefetch_bucket_size if the budget has room"
        )
