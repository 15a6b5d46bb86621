"""The thread by which a rank knows of the others: it tells where this one is, and watches where they are.

It is the only user of the store, so that a store which hangs never hangs training. About once a second it

- writes this rank's beat;
- takes over a failure that another rank has found;
- answers questions of order: another rank is about to enter collective N and asks whether this one does the same;
- reads the beat of its successor, or everybody's while this rank waits for something, and judges them.

Every rank watching one other keeps the cost linear in their number, and a failure is written once for all to read. The
first one stays: whoever falls because of another's death names that death.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

from zero3.ranks import deadlock
from zero3.ranks.position import Position
from zero3.ranks.questions import Answers, Question
from zero3.ranks.seen import Seen
from zero3.ranks.store import MEMORY, Beat, Board, Failure, Process, spell

log = logging.getLogger(__name__)

ORDER = (
    "modules must be called in the same order on all ranks, and so must what reads parameters (state_dict, gathered,"
    " get_fp32_parameter) or saves them (save_checkpoint), never on one rank alone. For experts that are routed per"
    " rank, put their container into one group (zero_optimization.leaf_module)."
)
URGENT = 0.05  # seconds between two looks while a collective has failed and nobody knows why
SIGNS = 5  # beats missed by a rank are enough to name it when a collective has failed
AT_ONCE = 64  # ranks whose beats are read in one look; more of them are looked at less often
POLL = (2e-4, 2e-2)  # seconds between two counts of answers, from the first on, doubling


class Heartbeat:
    """Beats until the rank ends. Its thread is a daemon: it keeps no process alive; a forked child has none.

    ``strict``: judge the others also while this rank waits for nothing that it knows of. ``elsewhere``: where this rank
    is with other engines, by their names.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        silence: float,
        beat: float,
        strict: bool,
        elsewhere: Callable[[], Mapping[str, Position]] = dict,
    ) -> None:
        self.board = board
        self.position = Position()
        self._elsewhere = elsewhere
        self.process = Process.this()
        self.seen: dict[int, Seen] = {}
        self.turns = 0  # how often the thread has come round: it does not while the store hangs
        self.moves = 0  # how often another rank was seen in a new position
        self.store_lost: str | None = None
        self.changed = threading.Condition()  # lock of what follows
        self.failure: Failure | None = None
        self._found: Failure | None = None  # by the thread that trains; to be posted
        self._question: Question | None = None
        self._state: Literal["running", "failed", "closed"] = "running"
        self._kicked = False
        self._waiting = False
        self._urgent = False
        # What follows is the thread's own.
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._successor = (rank + 1) % world_size
        self._world_size = world_size
        self._timeout = timeout
        self._silence = silence
        self._beat = beat
        self._strict = strict
        self._count = 0
        self._clock = 0.0  # seconds that this process was awake: being suspended is not the others' silence
        self._due = self._due_for_all = 0.0
        self._poll = POLL[0]
        self._many = max(1.0, world_size / AT_ONCE)  # how much slower many ranks have to be to the store
        self._longest_poll = POLL[1] * self._many
        self._answers: defaultdict[str, Answers] = defaultdict(Answers)
        self._computing: tuple[int, ...] = ()  # ranks of this host that give no beat, and spend CPU time
        self._logged: set[int] = set()  # ranks of whose silence the log tells
        self._knot: dict[int, Beat] = {}  # ranks that seemed to wait for each other, at the last look
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of rank {rank}", daemon=True)
        self._thread.start()

    # ---- called by other threads ----

    def watch(self, *, urgent: bool = False) -> None:
        """This rank waits: look at all ranks, now and at every beat; if ``urgent``, many times a second."""
        with self.changed:
            if not self._waiting or (urgent and not self._urgent):
                self._waiting, self._urgent, self._kicked = True, urgent, True
                self.changed.notify_all()

    def rest(self) -> None:
        """What this rank waited for has come."""
        with self.changed:
            self._waiting = self._urgent = False

    def ask(self, group: str, what: str) -> Question:
        """Ask all ranks whether their next collective of ``group`` is ``what``, too."""
        with self.changed:
            self._question = Question(group, self.position.issue(group, what), what)
            self._poll = POLL[0]
            self.changed.notify_all()
            return self._question

    def answered(self, question: Question, within: float) -> bool:
        """Wait for all ranks to have said the same, or for a failure, or for the time to pass."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._question is not question or self.failure or self.store_lost, within
            )
            return self._question is not question

    def settle(self, failure: Failure, within: float = 2.0) -> Failure:
        """Make ``failure`` known, unless another came first; returns the one that counts."""
        with self.changed:
            if self.failure is None:
                self._found = failure
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.failure or self.store_lost, within)
                self.failure = self.failure or failure  # else the store does not answer
            return self.failure

    def failed(self, within: float) -> Failure | None:
        """Wait that long for a failure."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure or self._state != "running", within)
            return self.failure

    def end(self, state: Literal["failed", "closed"], within: float = 2.0) -> None:
        """Say that this rank takes no part any more, and stop."""
        with self.changed:
            self._state = state
            self.changed.notify_all()
        self._thread.join(within)  # a store that hangs keeps the thread; it is a daemon

    def beat(self) -> Beat:
        """Where this rank is now."""
        here, elsewhere = self.position, self._elsewhere()
        return Beat(
            self._count,
            self.process,
            here.doing,
            here.waits,
            here.last(),
            self._state,
            here.remark,
            self._computing,
            next((position.waits_of(name) for name, position in elsewhere.items() if position.waits), None),
            {
                group: last
                for name, position in elsewhere.items()
                for group, last in position.last(name).items()
            },
        )

    def who(self, rank: int) -> str:
        """``rank 1 (host a, pid 7)``."""
        seen = self.seen.get(rank)
        process = self.process if rank == self._rank else seen.beat.process if seen else None
        return f"rank {rank}" + (f" (host {process.host}, pid {process.pid})" if process else "")

    def remarks(self) -> str:
        """What ranks remark, in sentences; empty if there is nothing."""
        said = {rank: seen.beat.remark for rank, seen in dict(self.seen).items()}
        said[self._rank] = self.position.remark
        return "".join(
            f" {self.who(rank)} went on after {said[rank]}." for rank in sorted(said) if said[rank]
        )

    def positions(self, ranks: list[int] | None = None) -> str:
        """Where ranks are, those in the same place together."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for rank in sorted([*self._others, self._rank]) if ranks is None else ranks:
            seen = self.seen.get(rank)
            if rank == self._rank:
                places[self.beat().position()].append(rank)
            elif seen is None:
                places["without a sign of life since the start"].append(rank)
            else:
                places[seen.beat.position()].append(rank)
        return "; ".join(f"{spell(ranks)} {place}" for place, ranks in places.items())

    def server_state(self) -> str:
        """What can be seen from here of the process that serves the store, in words."""
        seen = self.seen.get(0)
        if not self.board.served_by_rank_0 or seen is None or not seen.here:
            return ""
        return f" ({self.who(0)} is in state {seen.beat.process.state() or 'gone'})"

    def left(self) -> tuple[int, str] | None:
        """The first rank that was seen to have closed its engine or ended its program, and which it was."""
        seen = sorted(dict(self.seen).items())
        return next(((rank, each.beat.doing) for rank, each in seen if each.beat.state == "closed"), None)

    def behind(self, group: str, number: int) -> list[int]:
        """Ranks that were not seen at that collective yet."""
        seen = dict(self.seen)
        return [rank for rank in self._others if rank not in seen or seen[rank].beat.reached(group) < number]

    # ---- the thread ----

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            self._clock += min(now - last, 3 * self._beat)
            last = now
            if self.store_lost is None:
                try:
                    self._turn(now)
                except RuntimeError as error:  # whatever a store has to say
                    self._lose(str(error).partition("\n")[0])
            else:
                self._judge_processes()
            self.turns += 1
            with self.changed:
                if self._state != "running":
                    break
                called = self._called if self.store_lost is None else self._ended
                self.changed.wait_for(called, self._pause())
        if self.store_lost is None:
            try:
                self._write()
            except RuntimeError as error:
                self._lose(str(error).partition("\n")[0])
        self.board.leave()

    def _lose(self, why: str) -> None:
        with self.changed:
            self.store_lost = why
            self.failure = self.failure or self._found
            self.changed.notify_all()

    def _ended(self) -> bool:
        return self._state != "running"

    def _called(self) -> bool:
        new = self._question is not None and not self._question.asked
        return self._kicked or self._found is not None or new or self._ended()

    def _pause(self) -> float:
        if self.store_lost is not None:
            return URGENT if self._urgent else self._beat
        until_due = max(0.0, self._due - time.monotonic())
        if self._question is None or self.failure:
            return until_due
        self._poll = min(2 * self._poll, self._longest_poll)
        return min(self._poll, until_due)

    def _turn(self, now: float) -> None:
        with self.changed:
            question, kicked, self._kicked = self._question, self._kicked, False
            found, self._found = self._found, None
        if found is not None:
            self._settle(found)
        if question is not None and self.failure is None:
            self._discuss(question)
        if not kicked and now < self._due:
            return
        self._due = now + (URGENT if self._urgent else self._beat)
        self._write()
        if self.failure is not None:
            return
        self._take_over()
        for group in self.position.last():
            self._answer(group)
        self._read(self._whom(now, kicked))
        self._look_at_work()
        self._judge_processes()
        self._judge()

    def _write(self) -> None:
        self._count += 1
        self.board.write(self._rank, self.beat())

    def _settle(self, failure: Failure) -> None:
        self._adopt(self.board.post(failure))

    def _take_over(self) -> None:
        failure = self.board.failure()
        if failure is not None:
            self._adopt(failure)

    def _adopt(self, failure: Failure) -> None:
        """The run is over. Whoever waits here raises it; a program that hangs elsewhere has at least the log."""
        with self.changed:
            first = self.failure is None
            self.failure = self.failure or failure
            self.changed.notify_all()
        elsewhere = not (self._waiting or self._strict) and self.position.waits is None
        if first and elsewhere and failure.rank != self._rank and self._state == "running":
            log.critical("%s", failure.error())

    def _discuss(self, question: Question) -> None:
        """Ask, if that is still to be done; count who has said the same."""
        group, number = question.group, question.number
        if not question.asked:
            question.asked = True
            if number not in self._answers[group].given:  # else another rank asked, and was answered below
                self._compare(group, number, *self.board.ask(group, number, self._rank, question.what))
        elif self._poll >= self._longest_poll:
            self._take_over()
        if self.failure is None and self.board.same(group, number) == self._world_size:
            with self.changed:
                self._question = None
                self.changed.notify_all()

    def _answer(self, group: str) -> None:
        """Other ranks may have asked about collectives that this one has issued without asking, in any order."""
        answers = self._answers[group]
        count = self.board.questions(group)
        answers.read = max(answers.read, count - MEMORY)
        while answers.read < count:
            number = self.board.number(group, answers.read + 1)
            if number is None:
                break  # being written
            answers.read += 1
            answers.open.add(number)
        for number in sorted(answers.open):
            if number in answers.given:
                answers.open.remove(number)
            elif self.position.said(group, number) is not None:
                self._compare(group, number, *self.board.question(group, number))

    def _compare(self, group: str, number: int, rank: int, what: str) -> None:
        mine = self.position.said(group, number)
        assert mine is not None
        if mine != what:
            self._settle(self._disorder(group, number, rank, what, mine))
            return
        answers = self._answers[group]
        answers.give(number)
        if self.board.say_the_same(group, number) == self._world_size:
            for earlier in [kept for kept in answers.kept if kept < number]:
                self.board.forget(group, earlier)
                answers.kept.remove(earlier)

    def _disorder(self, group: str, number: int, rank: int, what: str, mine: str) -> Failure:
        self._read([rank])  # the last beat may be of before what it remarks
        (one, this), (other, that) = sorted([(rank, what), (self._rank, mine)])
        return Failure(
            "order", other,
            f"{self.who(other)} is about to {that} where {self.who(one)} is about to {this} ({group} {number}): "
            f"{ORDER}{self.remarks()}",
        )  # fmt: skip

    def _whom(self, now: float, kicked: bool) -> list[int]:
        everybody = self._waiting or self._suspicious() or len(self.seen) < len(self._others)
        if not everybody or (now < self._due_for_all and not (kicked and self._many == 1.0)):
            return [self._successor]
        self._due_for_all = now + (URGENT if self._urgent else self._beat) * self._many
        return self._others

    def _suspicious(self) -> bool:
        seen = self.seen.get(self._successor)
        return seen is not None and seen.silence > self._silence / 4

    def _read(self, ranks: list[int]) -> None:
        known = [rank for rank in ranks if rank in self.seen]
        for rank, beat in self.board.read(known, [rank for rank in ranks if rank not in self.seen]).items():
            seen = self.seen.get(rank)
            if seen is None:
                seen = self.seen[rank] = Seen(beat, self._clock, self._clock)
                self.moves += 1
            elif beat.count != seen.beat.count:
                if (beat.said, beat.doing, beat.state) != (seen.beat.said, seen.beat.doing, seen.beat.state):
                    self.moves += 1
                seen.take(beat, self._clock)
                self._hear_of_work(beat)
            seen.looked = self._clock
            seen.here = seen.here or beat.process.can_be_seen()

    def _hear_of_work(self, beat: Beat) -> None:
        """See Note [A rank that computes and says nothing]."""
        for rank in beat.computing:
            if rank in self.seen:
                self.seen[rank].worked = self._clock

    def _look_at_work(self) -> None:
        """The same of ranks on this host; the CPU time of this very process says nothing of another rank."""
        self._computing = tuple(
            rank
            for rank, seen in self.seen.items()
            if seen.here
            and seen.silence > 2 * self._beat
            and seen.beat.process.host == self.process.host
            and seen.beat.process.pid != self.process.pid
            and seen.look_at_work(self._clock)
        )

    def _judge_processes(self) -> None:
        """A process that was seen alive here, and ended without a word, is lost at once."""
        gone = [rank for rank, seen in self.seen.items() if seen.here and seen.beat.process.is_dead()]
        if gone and self.store_lost is None:
            self._read(gone)  # it may have taken its leave since the last look
            self._take_over()
        gone = [rank for rank in gone if self.seen[rank].beat.state == "running"]
        if not gone or self.failure is not None:
            return
        failure = Failure(
            "lost", gone[0],
            f"{self._who(gone)} died without a word, last seen {self.seen[gone[0]].beat.position()}: see its log, "
            "and dmesg for a kill for lack of memory; start again from the last checkpoint.",
        )  # fmt: skip
        if self.store_lost is None:
            self._settle(failure)
        else:
            self._adopt(failure)

    def _judge(self) -> None:
        for rank, seen in self.seen.items():
            for group, (number, what) in seen.beat.said.items():
                mine = self.position.said(group, number)
                if mine is not None and mine != what:
                    return self._settle(self._disorder(group, number, rank, what, mine))
        for group, number, what in self._depends_on():
            for rank, seen in self.seen.items():
                if seen.beat.state == "closed" and seen.beat.reached(group) < number:
                    return self._settle(self._left(rank, group, number, what))
        running = {rank: seen.beat for rank, seen in self.seen.items() if seen.beat.state == "running"}
        before, self._knot = self._knot, deadlock.find(self._rank, running | {self._rank: self.beat()})
        if deadlock.is_tied(before, self._knot):
            tied = sorted(self._knot)
            words = f"{spell(tied)} wait for each other: {self.positions(tied)}: {ORDER}{self.remarks()}"
            return self._settle(Failure("order", tied[0], words))
        silent = self._silent_ranks()
        if silent and (self._waiting or self._strict):
            self._settle(self._silence_of(silent))
        else:
            self._log_silence(silent)
        return None

    def _log_silence(self, silent: list[int]) -> None:
        """Nobody waits for them here, so they may come back; a program may be waiting in a collective of its own."""
        if set(silent) - self._logged:
            log.critical("%s", self._silence_of(silent).error())
        if back := self._logged - set(silent):
            log.warning("%s gives signs of life again", spell(back))
        self._logged = set(silent)

    def _depends_on(self) -> list[tuple[str, int, str]]:
        """Collectives that cannot end unless every rank joins in."""
        if self._strict:
            return [(group, number, what) for group, (number, what) in self.position.last().items()]
        waits = self.position.waits
        return [waits] if waits is not None else []

    def _left(self, rank: int, group: str, number: int, what: str) -> Failure:
        beat = self.seen[rank].beat
        return Failure(
            "lost", rank,
            f"{self.who(rank)} {beat.doing} after {group} {beat.reached(group)}, and "
            f"{self.who(self._rank)} is to {what} as {group} {number}: all ranks must run forward, backward and step "
            f"equally often; give every rank the same number of batches.{self.remarks()}",
        )  # fmt: skip

    def _silent_ranks(self) -> list[int]:
        """Those whose time is up, and with them all that fell silent about then: a host takes all its ranks along."""
        limit = min(self._silence, SIGNS * self._beat) if self._urgent else self._silence
        running = [(rank, seen) for rank, seen in self.seen.items() if seen.beat.state == "running"]
        still = {rank: seen.stillness(self._timeout) for rank, seen in running}
        if all(seconds <= limit for seconds in still.values()):
            return []
        return [rank for rank, seconds in still.items() if seconds > limit / 2]

    def _silence_of(self, ranks: list[int]) -> Failure:
        first = max(ranks, key=lambda rank: self.seen[rank].stillness(self._timeout))
        seen = self.seen[first]
        state = seen.beat.process.state() if seen.here else None
        still = f" (its process still exists, in state {state})" if state else ""
        return Failure(
            "lost", first,
            f"{self._who(ranks)} gave no sign of life for {seen.silence:.0f} s{still}, last seen "
            f"{seen.beat.position()}: see that its host and the network are up; start again from the last checkpoint. "
            "A rank that is only slow to answer is given more time by tiering.distributed.silence.",
        )  # fmt: skip

    def _who(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return self.who(ranks[0])
        hosts = sorted({self.seen[rank].beat.process.host for rank in ranks})
        return f"{spell(ranks)} ({'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts)})"
