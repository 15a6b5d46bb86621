"""The heartbeat: a thread that publishes the position of this rank, and watches the positions of the other ranks.

It is the only user of the rank store, so a store that hangs never hangs training. About once a second it

- writes this rank's beat;
- reads whether another rank has published a failure;
- confirms proposals: another rank is about to enter collective N, and must know that this rank's is the same;
- reads the beat of its successor, or all beats while this rank waits for something, and judges the ranks.

Each rank watches one other, which keeps the cost linear in their number. A failure is written once, and all ranks read
it. The first failure stays: a rank that falls because of another rank's death names that death.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from zero3.ranks import deadlock
from zero3.ranks.observations import Observations
from zero3.ranks.position import Position
from zero3.ranks.proposals import Answers, Proposal
from zero3.ranks.store import MEMORY, Beat, Failure, Process, RankStore, spell

log = logging.getLogger(__name__)

ORDER = (
    "all ranks must call modules in the same order, and so must calls that read parameters (state_dict, gathered,"
    " get_fp32_parameter) or save them (save_checkpoint): do not make these calls on one rank alone. For experts that"
    " each rank routes separately, put their container into one group (zero_optimization.leaf_module)."
)
URGENT = 0.05  # seconds between two looks after a collective has failed for an unknown reason
SIGNS = 5  # missed beats after which a rank is named as the cause of a failed collective
AT_ONCE = 64  # ranks whose beats are read at the full rate; with more ranks the rate is lower
# Seconds between two reads of the number of confirmations: at first, and at most after doubling.
POLL = (2e-4, 2e-2)
# By group, with the name of its engine: also of engines that this rank has closed and another one still waits in.
_memberships: dict[str, Collection[int]] = {}


@dataclass(frozen=True)
class Limits:
    """Times in seconds after which ranks judge each other."""

    timeout: float  # without a move of any rank, until a wait fails
    silence: float = 30.0  # without a sign of life, until a rank is lost
    beat: float = 1.0  # between two beats; lowered so that SIGNS of them fit into ``silence``
    patience: float = 10.0  # of a wait, until a warning is logged

    def __post_init__(self) -> None:
        object.__setattr__(self, "beat", min(self.beat, self.silence / SIGNS))


class Heartbeat:
    """Beats until the rank ends. Its thread is a daemon, so it keeps no process alive. A forked child has none.

    ``strict``: judge the other ranks also while this rank waits for no collective that it knows of. ``elsewhere``
    returns the positions of this rank with other engines, by their names. ``place`` is that of this rank in a mesh.
    ``members`` are the ranks by group of collectives, of groups that not all ranks belong to; ``engine`` is the name of
    the engine.
    """

    def __init__(
        self,
        store: RankStore,
        rank: int,
        world_size: int,
        limits: Limits,
        *,
        strict: bool,
        elsewhere: Callable[[], Mapping[str, Position]] = dict,
        place: str = "",
        members: Mapping[str, Collection[int]] = MappingProxyType({}),
        engine: str = "",
    ) -> None:
        self.store = store
        self.position = Position(members)
        self._elsewhere = elsewhere
        self.process = Process.this(place)
        # The thread writes these three; other threads only read them.
        self.observed = Observations(rank, world_size, self.process, self.beat)
        self.turns = 0  # loops of the thread: the number stands still while the store hangs
        self.store_lost: str | None = None  # why the store cannot be used any more
        # Its lock guards the fields up to the next comment. Waiters are notified when one of them changes.
        self.changed = threading.Condition()
        self.failure: Failure | None = None
        self._unposted: Failure | None = None  # from the thread that trains, to be written to the store
        self._proposal: Proposal | None = None
        self._state: Literal["running", "failed", "closed"] = "running"
        self._kicked = False
        self._waiting = False
        self._urgent = False
        # The fields below belong to the thread, which uses them without a lock.
        self._rank = rank
        self._successor = (rank + 1) % world_size
        if engine:
            _memberships.update(self.position.members(engine))
        self._all_ranks = range(world_size)
        self._members_here = members
        self._limits = limits
        self._strict = strict
        self._count = 0
        # Seconds that this process ran. The time of its own suspension does not count as silence of others.
        self._clock = 0.0
        self._next_beat = self._next_full_read = 0.0
        self._poll = POLL[0]
        self._slowdown = max(1.0, world_size / AT_ONCE)  # how much rarer many ranks read the store
        self._longest_poll = POLL[1] * self._slowdown
        self._answers: defaultdict[str, Answers] = defaultdict(Answers)
        self._computing: tuple[int, ...] = ()  # ranks of this host that give no beat and spend CPU time
        self._logged: set[int] = set()  # ranks whose silence was logged
        self._deadlock: dict[int, Beat] = {}  # ranks that seemed to wait for each other at the last look
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of rank {rank}", daemon=True)
        self._thread.start()

    # ---- calls by other threads ----

    def watch(self, *, urgent: bool = False) -> None:
        """This rank waits: read all beats now and at every beat; if ``urgent``, many times a second."""
        with self.changed:
            if not self._waiting or (urgent and not self._urgent):
                self._waiting, self._urgent, self._kicked = True, urgent, True
                self.changed.notify_all()

    def end_watch(self) -> None:
        """The wait of this rank is over."""
        with self.changed:
            self._waiting = self._urgent = False

    def propose(self, group: str, label: str) -> Proposal:
        """Ask all ranks to confirm that their next collective of ``group`` is ``label``."""
        with self.changed:
            # The collective is counted first: if another rank proposes it, the thread can answer before it sees this
            # question.
            self._proposal = Proposal(group, self.position.issue(group, label), label)
            self._poll = POLL[0]
            self.changed.notify_all()
            return self._proposal

    def confirmed(self, question: Proposal, within: float) -> bool:
        """Wait until all ranks have confirmed, a failure comes, or the time passes. Returns whether all confirmed."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._proposal is not question or self.failure or self.store_lost, within
            )
            return self._proposal is not question

    def publish(self, failure: Failure, within: float = 2.0) -> Failure:
        """Publish ``failure`` to all ranks, unless another one came first. Returns the first one."""
        with self.changed:
            if self.failure is None:
                # Only the thread uses the store, so that this one cannot hang in it.
                self._unposted = failure
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.failure or self.store_lost, within)
                # Still None if the store does not answer in time: then this rank fails without the others.
                self.failure = self.failure or failure
            return self.failure

    def wait_for_failure(self, within: float) -> Failure | None:
        """Wait ``within`` seconds for a failure. Returns early when this rank ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure or self._state != "running", within)
            return self.failure

    def end(self, state: Literal["failed", "closed"], within: float = 2.0) -> None:
        """Publish that this rank has ended, and stop the thread."""
        with self.changed:
            self._state = state
            self.changed.notify_all()
        # With a limit: a store that hangs keeps the thread for ever. It is a daemon, so the process can end.
        self._thread.join(within)

    def beat(self) -> Beat:
        """The current beat of this rank."""
        position, elsewhere = self.position, self._elsewhere()
        return Beat(
            self._count,
            self.process,
            position.activity,
            position.waits,
            position.last(),
            self._state,
            position.remark,
            self._computing,
            next((other.waits_of(name) for name, other in elsewhere.items() if other.waits), None),
            {group: last for name, other in elsewhere.items() for group, last in other.last(name).items()},
        )

    def ranks_of(self, group: str) -> Collection[int]:
        """The ranks that take part in the collectives of ``group``."""
        return self._members_here.get(group, self._all_ranks)

    def _members(self) -> dict[str, Collection[int]]:
        """The ranks by group, of groups that not all ranks belong to, also of other engines."""
        return {**_memberships, **self.position.members()}

    def server_state(self) -> str:
        """The state of the process that serves the store, as text; empty if it cannot be observed from here."""
        peer = self.observed.get(0)
        if not self.store.served_by_rank_0 or peer is None or not peer.is_local:
            return ""
        return f" ({self.observed.describe(0)} is in state {peer.beat.process.state() or 'gone'})"

    # ---- the thread ----

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            self._clock += min(now - last, 3 * self._limits.beat)
            last = now
            if self.store_lost is None:
                try:
                    self._turn(now)
                except RuntimeError as error:  # torch's stores have no narrower class of errors
                    self._lose_store(str(error).partition("\n")[0])
            else:
                self._judge_processes()
            # After the access to the store: other threads see from an unchanged number that it hangs.
            self.turns += 1
            with self.changed:
                if self._state != "running":
                    break
                wakes = self._has_work if self.store_lost is None else self._is_ending
                self.changed.wait_for(wakes, self._pause())
        if self.store_lost is None:
            try:
                self._write()
            except RuntimeError as error:
                self._lose_store(str(error).partition("\n")[0])
        # By this thread, which alone uses the connection.
        self.store.disconnect()

    def _lose_store(self, reason: str) -> None:
        with self.changed:
            # Both under one lock: whoever waits for an answer finds the reason, and a failure that could not be
            # written.
            self.store_lost = reason
            self.failure = self.failure or self._unposted
            self.changed.notify_all()

    def _is_ending(self) -> bool:
        return self._state != "running"

    def _has_work(self) -> bool:
        new = self._proposal is not None and not self._proposal.is_posted
        return self._kicked or self._unposted is not None or new or self._is_ending()

    def _pause(self) -> float:
        if self.store_lost is not None:
            return URGENT if self._urgent else self._limits.beat
        until_beat = max(0.0, self._next_beat - time.monotonic())
        if self._proposal is None or self.failure:
            return until_beat
        self._poll = min(2 * self._poll, self._longest_poll)
        return min(self._poll, until_beat)

    def _turn(self, now: float) -> None:
        with self.changed:
            # Taken under the lock and used without it: the store may take long.
            question, kicked, self._kicked = self._proposal, self._kicked, False
            unposted, self._unposted = self._unposted, None
        # First: a failure ends the run, and no proposal is answered after it.
        if unposted is not None:
            self._publish(unposted)
        if question is not None and self.failure is None:
            self._advance_proposal(question)
        if not kicked and now < self._next_beat:
            return
        self._next_beat = now + (URGENT if self._urgent else self._limits.beat)
        self._write()
        if self.failure is not None:
            return
        # Before the judgement below: the first failure counts, and it may be the cause of the one that this rank finds.
        self._take_over()
        for group in self.position.last():
            self._answer(group)
        self._read_beats(self._ranks_to_read(now, kicked))
        self._computing = self.observed.computing_here(self._clock, 2 * self._limits.beat)
        self._judge_processes()
        self._judge()

    def _write(self) -> None:
        self._count += 1
        self.store.write_beat(self._rank, self.beat())

    def _publish(self, failure: Failure) -> None:
        self._adopt(self.store.post_failure(failure))

    def _take_over(self) -> None:
        failure = self.store.failure()
        if failure is not None:
            self._adopt(failure)

    def _adopt(self, failure: Failure) -> None:
        """``failure`` ends the run. A wait of this rank raises it. If it waits for nothing here, it is logged."""
        with self.changed:
            first = self.failure is None
            # The first one stays, whichever thread has found it.
            self.failure = self.failure or failure
            self.changed.notify_all()
        unraised = not (self._waiting or self._strict) and self.position.waits is None
        if first and unraised and failure.rank != self._rank and self._state == "running":
            log.critical("%s", failure.error())

    def _advance_proposal(self, question: Proposal) -> None:
        """Write the proposal, unless that is done, and read how many ranks have confirmed it."""
        group, number = question.group, question.number
        if not question.is_posted:
            # Before the access to the store: after an error, nothing is proposed twice.
            question.is_posted = True
            # Otherwise another rank has proposed this collective, and _answer has confirmed it.
            if number not in self._answers[group].numbers:
                self._compare(group, number, *self.store.propose(group, number, self._rank, question.label))
        elif self._poll >= self._longest_poll:
            self._take_over()
        if self.failure is None and self.store.confirmations(group, number) == len(self.ranks_of(group)):
            with self.changed:
                self._proposal = None
                self.changed.notify_all()

    def _answer(self, group: str) -> None:
        """Confirm proposals of other ranks for collectives that this rank has issued without one, in any order."""
        answers = self._answers[group]
        count = self.store.proposal_count(group)
        answers.read_count = max(answers.read_count, count - MEMORY)
        while answers.read_count < count:
            number = self.store.proposed_number(group, answers.read_count + 1)
            if number is None:
                break  # another rank is writing it
            # Only after its number was read: an index without a number is read again at the next beat.
            answers.read_count += 1
            answers.open_numbers.add(number)
        for number in sorted(answers.open_numbers):
            if number in answers.numbers:
                answers.open_numbers.remove(number)
            elif self.position.label_of(group, number) is not None:
                self._compare(group, number, *self.store.proposal(group, number))

    def _compare(self, group: str, number: int, rank: int, label: str) -> None:
        """Confirm collective ``number``, which ``rank`` proposes as ``label``, or publish that the order differs."""
        own_label = self.position.label_of(group, number)
        assert own_label is not None
        if own_label != label:
            self._publish(self._order_failure(group, number, rank, label, own_label))
            return
        answers = self._answers[group]
        answers.add(number)
        # The last rank that confirms deletes earlier proposals: the rank that waited for them has continued.
        if self.store.confirm(group, number) == len(self.ranks_of(group)):
            for earlier in [confirmed for confirmed in answers.deletable if confirmed < number]:
                self.store.delete_proposal(group, earlier)
                answers.deletable.remove(earlier)

    def _order_failure(self, group: str, number: int, rank: int, label: str, own_label: str) -> Failure:
        self._read_beats([rank])  # the last beat may be older than its remark
        (first, label_of_first), (second, label_of_second) = sorted([(rank, label), (self._rank, own_label)])
        describe, remarks = self.observed.describe, self.observed.remarks()
        return Failure(
            "order", second,
            f"{describe(second)} is about to {label_of_second} where {describe(first)} is about to {label_of_first} "
            f"({group} {number}): {ORDER}{remarks}",
        )  # fmt: skip

    def _ranks_to_read(self, now: float, kicked: bool) -> list[int]:
        everybody = self._waiting or self._suspicious() or len(self.observed) < len(self.observed.other_ranks)
        if not everybody or (now < self._next_full_read and not (kicked and self._slowdown == 1.0)):
            return [self._successor]
        self._next_full_read = now + (URGENT if self._urgent else self._limits.beat) * self._slowdown
        return self.observed.other_ranks

    def _suspicious(self) -> bool:
        peer = self.observed.get(self._successor)
        return peer is not None and peer.silence > self._limits.silence / 4

    def _read_beats(self, ranks: list[int]) -> None:
        observed = [rank for rank in ranks if rank in self.observed]
        beats = self.store.read_beats(observed, [rank for rank in ranks if rank not in self.observed])
        self.observed.update(beats, self._clock)

    def _judge_processes(self) -> None:
        """A local process that has ended without publishing it is lost at once."""
        dead_ranks = self.observed.dead
        if dead_ranks and self.store_lost is None:
            self._read_beats(dead_ranks)  # it may have published its end since the last look
            self._take_over()
        dead_ranks = [rank for rank in dead_ranks if self.observed[rank].beat.state == "running"]
        if not dead_ranks or self.failure is not None:
            return
        failure = Failure(
            "lost", dead_ranks[0],
            f"{self.observed.describe_all(dead_ranks)} died without an error message, last seen "
            f"{self.observed[dead_ranks[0]].beat.position()}: see its log, and dmesg for an out-of-memory kill; restart"
            " from the last checkpoint.",
        )  # fmt: skip
        if self.store_lost is None:
            self._publish(failure)
        else:
            self._adopt(failure)

    def _judge(self) -> None:
        for rank, peer in self.observed:
            for group, (number, label) in peer.beat.last.items():
                own_label = self.position.label_of(group, number)
                if own_label is not None and own_label != label:
                    return self._publish(self._order_failure(group, number, rank, label, own_label))
        for group, number, label in self._depends_on():
            members = self.ranks_of(group)
            for rank, peer in self.observed:
                if peer.beat.state == "closed" and rank in members and peer.beat.reached(group) < number:
                    return self._publish(self._closed_failure(rank, group, number, label))
        running = {rank: peer.beat for rank, peer in self.observed.running.items()}
        before, self._deadlock = (
            self._deadlock,
            deadlock.find(self._rank, running | {self._rank: self.beat()}, self._members()),
        )
        if deadlock.is_deadlock(before, self._deadlock):
            ranks = sorted(self._deadlock)
            positions, remarks = self.observed.positions(ranks), self.observed.remarks()
            message = f"deadlock: {spell(ranks)} wait for each other: {positions}: {ORDER}{remarks}"
            return self._publish(Failure("order", ranks[0], message))
        silent = self._silent_ranks()
        if silent and (self._waiting or self._strict):
            self._publish(self._silence_failure(silent))
        else:
            self._log_silence(silent)
        return None

    def _log_silence(self, silent: list[int]) -> None:
        """Log silent ranks. This rank waits for none of them, but its program may, in a collective of its own."""
        if set(silent) - self._logged:
            log.critical("%s", self._silence_failure(silent).error())
        if returned := self._logged - set(silent):
            log.warning("%s gives signs of life again", spell(returned))
        self._logged = set(silent)

    def _depends_on(self) -> list[tuple[str, int, str]]:
        """Collectives of this rank that cannot end unless every rank enters them."""
        if self._strict:
            return [(group, number, label) for group, (number, label) in self.position.last().items()]
        waits = self.position.waits
        return [waits] if waits is not None else []

    def _closed_failure(self, rank: int, group: str, number: int, label: str) -> Failure:
        beat, describe = self.observed[rank].beat, self.observed.describe
        return Failure(
            "lost", rank,
            f"{describe(rank)} {beat.activity} after {group} {beat.reached(group)}, and {describe(self._rank)} is "
            f"about to {label} ({group} {number}): all ranks must run forward, backward and step equally often; "
            f"give every rank the same number of batches.{self.observed.remarks()}",
        )  # fmt: skip

    def _silent_ranks(self) -> list[int]:
        """Ranks that are silent for too long, with all that fell silent about then: a lost host loses all its ranks."""
        limit = min(self._limits.silence, SIGNS * self._limits.beat) if self._urgent else self._limits.silence
        running = self.observed.running
        stillness = {rank: peer.stillness(self._limits.timeout) for rank, peer in running.items()}
        if all(seconds <= limit for seconds in stillness.values()):
            return []
        return [rank for rank, seconds in stillness.items() if seconds > limit / 2]

    def _silence_failure(self, ranks: list[int]) -> Failure:
        first = max(ranks, key=lambda rank: self.observed[rank].stillness(self._limits.timeout))
        peer = self.observed[first]
        state = peer.beat.process.state() if peer.is_local else None
        process = f" (its process still exists, in state {state})" if state else ""
        return Failure(
            "lost", first,
            f"{self.observed.describe_all(ranks)} gave no sign of life for {peer.silence:.0f} s{process}, last seen "
            f"{peer.beat.position()}: check that its host and the network are up; restart from the last "
            "checkpoint. If the rank is only slow, raise tiering.distributed.silence.",
        )  # fmt: skip
