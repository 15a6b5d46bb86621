"""What bench_checkpoint.py measures and concludes, and that a load must have loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from checkpoint import background, dd, saver, sides, snapshots, tables, watch
from checkpoint.background import Trained
from checkpoint.dd import DdError, Disk, Moved
from checkpoint.files import make_cold
from checkpoint.ours import CONSTANT, Ours
from checkpoint.saver import Saver, Saving
from checkpoint.scale import QUICK
from checkpoint.side import Reading, Side, Trip
from checkpoint.state import InMemory
from checkpoint.tables import COPY, READ, WRITE, Measured
from checkpoint.torch_dcp import TorchDcp
from checkpoint.torch_save import TorchSave
from frame.reference_model import Model
from frame.side import Place, SideError
from larger.watch import Sample

from .known import GB, MB

SMALL = Model(width=64, layers=1, sequence=8)


def a_reading(seconds: float = 2.0, **changes: Any) -> Reading:
    defaults = Reading(
        seconds=seconds,
        nbytes=3 * GB,
        before=GB,
        rise=10 * MB,
        spare=50 * MB,
        charged=20 * MB,
        disk=(3 * GB, 3 * GB),
        figures={},
    )
    return replace(defaults, **changes)


def another_dd(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """One that does something else."""
    path = directory / "dd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


class TestDd:
    @pytest.fixture
    def small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dd, "BLOCKS", (1 << 16, 1 << 18))

    def test_moves_whole_blocks(self, tmp_path: Path, small_blocks: None) -> None:
        try:
            disk = Disk(tmp_path, 300_000)
        except DdError as refused:
            pytest.skip(f"{tmp_path} is on no disk: {refused}")
        assert disk.nbytes == 2 << 18
        for moved in (disk.write(), disk.write(fsync=True), disk.read(), disk.copy()):
            assert moved.nbytes == disk.nbytes
            assert 0 < moved.seconds < 60
        assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("file", disk.nbytes)]

    def test_bytes_that_were_no_disks_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
    ) -> None:
        another_dd(tmp_path, monkeypatch, "exit 0")
        with pytest.raises(DdError, match=r"bytes of a disk, instead of 0 and 262,144: /dev/zero or"):
            Disk(tmp_path, 1)

    def test_one_that_fails_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
    ) -> None:
        another_dd(tmp_path, monkeypatch, "echo no O_DIRECT >&2; exit 3")
        with pytest.raises(DdError, match=r"oflag=direct ended with status 3: no O_DIRECT$"):
            Disk(tmp_path, 1)

    def test_the_faster_block_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
    ) -> None:
        def run(self: Disk, block: int, *operands: object, expected: tuple[int, int]) -> Moved:
            return Moved(1.0 / block, self.nbytes)

        monkeypatch.setattr(Disk, "_run", run)
        disk = Disk(tmp_path, 1)
        assert {moved.seconds for moved in (disk.write(), disk.read(), disk.copy())} == {1.0 / (1 << 18)}


class TestMemory:
    def test_the_page_cache_counts_once_and_every_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        residents = {1: (10, 20), 2: (5, 20)}
        monkeypatch.setattr(
            watch,
            "sample",
            lambda pid: Sample(0.0, residents[pid][0], 7, 7, residents[pid][1]) if pid in residents else None,
        )
        with watch.charged([1, 2]) as charge:
            residents |= {1: (30, 60), 2: (5, 60)}
        assert (charge.samples[0], charge.samples[-1]) == (35, 95)
        assert charge.rise == 60
        charge.take([1, 3])  # one of them has ended
        assert charge.samples[-1] == 95

    def test_what_happens_within_the_block_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        samples = iter([1, 9, 9, 2])
        last = [1]

        def sample(pid: int) -> Sample:
            last[0] = next(samples, last[0])
            return Sample(0.0, last[0], 0, 0, 0)

        monkeypatch.setattr(watch, "sample", sample)
        monkeypatch.setattr(watch, "EVERY", 0.001)
        with watch.charged([1]) as charge:
            while len(charge.samples) < 4:
                pass
        assert (charge.rise, charge.samples[-1]) == (8, 2)


def cached(path: Path) -> bool:
    """Whether the first page can be read without waiting for a disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def test_what_is_cold_is_not_in_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_bytes(bytes(1 << 20))
    assert cached(file)
    make_cold(tmp_path)
    if cached(file):
        pytest.skip(f"{tmp_path} is on no disk: the page cache is all there is")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TorchSave, {}),
        (TorchSave, {"mmap": True}),
        pytest.param(TorchDcp, {}, marks=pytest.mark.filterwarnings("ignore:torch.distributed is disabled")),
    ],
    ids=str,
)
def test_peers_load_what_they_saved(kind: type[InMemory], options: dict[str, Any], tmp_path: Path) -> None:
    side: Any = kind(SMALL, {})
    expected = {name: {key: value.clone() for key, value in of.items()} for name, of in side.state.items()}
    parameters = sum(value.numel() for value in SMALL.build().parameters())
    assert side.facts()["parameters"] == parameters
    assert sum(value.nbytes for of in side.state.values() for value in of.values()) == 12 * parameters
    side.save(str(tmp_path / "saved"))
    side.change()
    assert all(not value.any() for of in side.state.values() for value in of.values())
    side.load(str(tmp_path / "saved"), **options)
    assert all(
        side.state[name][key].equal(value) for name, of in expected.items() for key, value in of.items()
    )


BASELINE = 100


def saving(side: Saver) -> Saving:
    """The worker that holds ``side``, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "baseline", lambda threads: BASELINE)
        return Saving(lambda model, settings: side, 1, {"width": 64, "layers": 1, "sequence": 8}, {})


class TestOurs:
    @pytest.fixture(params=["nvme", "ram"])
    def side(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ours]:
        scale = replace(QUICK, model=SMALL)
        spec = sides.on_nvme(scale) if request.param == "nvme" else sides.in_memory(scale)
        (tmp_path / "swap").mkdir()
        side = Ours(SMALL, {"directory": str(tmp_path / "swap"), **spec.settings})
        yield side
        side.close()

    def test_it_goes_on_where_it_saved(self, side: Ours, tmp_path: Path) -> None:
        worker = saving(side)
        saved = worker.save(str(tmp_path / "saved"))
        assert saved["ceiling"] == BASELINE + (side.room() or 0) > BASELINE + CONSTANT
        worker.change()
        assert side.fingerprint()[0] == 2
        worker.load(str(tmp_path / "saved"), {})
        assert side.fingerprint()[0] == 1

    def test_trains_with_a_save(self, side: Ours, tmp_path: Path) -> None:
        batches = SMALL.batches(1)
        assert side.train(batches, 2, str(tmp_path / "none"), "") == {}
        behind = side.train(batches, 2, str(tmp_path / "behind"), "foreground")
        assert (behind["steps"], behind["meanwhile"]) == (0, 0)
        during = side.train(batches, 2, str(tmp_path / "during"), "background")
        assert 0 < during["stalled"] <= during["saved"]
        assert side.engine.global_steps == 7
        assert {path.name for path in tmp_path.iterdir()} == {"swap", "behind", "during"}


class Known(Saver):
    """A side of one number; ``moves`` says what it does."""

    def __init__(self, *moves: str) -> None:
        self.value, self.moves, self.saved = 1.0, moves, 0.0

    def facts(self) -> dict[str, Any]:
        return {"about": "known"}

    def save(self, directory: str) -> None:
        self.saved = self.value

    def load(self, directory: str, **options: Any) -> None:
        if "load" in self.moves:
            self.value = self.saved

    def change(self) -> None:
        if "change" in self.moves:
            self.value += 1

    def fingerprint(self) -> list[float]:
        return [self.value]

    def room(self) -> int:
        return 7


class TestSaving:
    def test_a_round(self) -> None:
        worker = saving(Known("change", "load"))
        assert worker.facts()["about"] == "known"
        saved = worker.save("somewhere")
        assert saved["ceiling"] == BASELINE + 7
        assert saved["peak"] >= saved["before"] > 0
        worker.change()
        assert worker.load("somewhere", {}).keys() == saved.keys()

    def test_a_load_that_does_nothing_is_seen(self) -> None:
        worker = saving(Known("change"))
        worker.save("somewhere")
        worker.change()
        with pytest.raises(
            RuntimeError, match=r"what was loaded \(\[2\.0\]\) is not what was saved \(\[1\.0\]\)"
        ):
            worker.load("somewhere", {})

    def test_a_state_that_does_not_change_is_seen(self) -> None:
        worker = saving(Known("load"))
        worker.save("somewhere")
        with pytest.raises(RuntimeError, match="did not change"):
            worker.change()


class TestSide:
    @pytest.fixture
    def ranks(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """What each rank says of a save or load of ten bytes; rank 1 is the slower one, rank 0 takes more."""
        common = {"before": 10, "ceiling": 30, "disk": [5, 5], "figures": {}}
        answers = [common | {"seconds": 1.0, "peak": 25}, common | {"seconds": 2.0, "peak": 22}]

        def call(self: Side, method: str, **arguments: Any) -> list[dict[str, Any]]:
            path = Path(arguments.get("directory", ""))
            match method:
                case "train" | "save":
                    (path / "folder").mkdir(parents=True)
                    (path / "folder" / "file").write_bytes(bytes(10))
                case "load":
                    assert (path / "folder" / "file").exists()
            return answers

        @contextmanager
        def charged(pids: object) -> Iterator[watch.Charge]:
            yield watch.Charge([100, 107, 103])

        monkeypatch.setattr(Side, "_start", lambda self, prefix: None)
        monkeypatch.setattr(Side, "built", lambda self, seconds: None)
        monkeypatch.setattr(Side, "call", call)
        monkeypatch.setattr("checkpoint.side.charged", charged)
        return answers

    def test_the_slowest_and_the_largest_rank_count(self, place: Place, ranks: list[dict[str, Any]]) -> None:
        with Side(sides.on_nvme(QUICK, 2), place) as side:
            trip = side.trip()
            assert side.train(3, "background") == trip.saved
        assert trip.saved == Reading(
            seconds=2.0, nbytes=10, before=10, rise=15, spare=5, charged=7, disk=(10, 10), figures={}
        )
        assert trip.loaded == {"": trip.saved}
        assert list(place.directory.iterdir()) == []

    def test_every_way_of_loading_has_its_turn(self, place: Place, ranks: list[dict[str, Any]]) -> None:
        ranks[0]["ceiling"] = ranks[1]["ceiling"] = None
        with Side(sides.torch_save(QUICK), place) as side:
            trip = side.trip()
        assert list(trip.loaded) == ["", sides.MMAP]
        assert trip.saved.spare is None

    def test_a_load_from_the_page_cache_is_refused(self, place: Place, ranks: list[dict[str, Any]]) -> None:
        ranks[0]["disk"] = [3, 0]
        with (
            Side(sides.torch_dcp(QUICK), place) as side,
            pytest.raises(SideError, match="loaded 10 bytes, of which 8 came from a disk"),
        ):
            side.trip()
        assert list(place.directory.iterdir()) == []

    @pytest.mark.slow
    def test_a_peer_in_a_process_of_its_own(self, place: Place) -> None:
        spec = replace(sides.torch_save(QUICK), model=SMALL)
        with Side(spec, place) as side:
            trip = side.trip()
        nbytes = 12 * side.facts["parameters"]
        assert nbytes < trip.saved.nbytes < nbytes + 100_000  # and its names
        assert trip.saved.disk[1] >= nbytes
        assert trip.saved.seconds > 0
        assert list(place.directory.iterdir()) == []


def measured(name: str, saved: Reading, loaded: Reading, rounds: int = 3, **ways: Reading) -> Measured:
    return Measured(name, {}, [Trip(saved, {"": loaded, **ways})] * rounds)


class TestTables:
    DISK: ClassVar[dict[str, list[Moved]]] = {
        WRITE: [Moved(1.0, 3 * GB)] * 3,
        READ: [Moved(1.5, 3 * GB)] * 3,
        COPY: [Moved(2.0, 3 * GB)] * 3,
    }

    def test_times(self) -> None:
        ours = measured("ours", a_reading(2.0), a_reading(4.0))
        peer = measured("peer", a_reading(8.0), a_reading(8.0), mmap=a_reading(6.0))
        table = tables.times("known", {"ours": ours, "peer": peer}, self.DISK)
        same = "{0} ({0}-{0})".format
        saved, loaded = table.rows[0][1:5], table.rows[0][5:]
        assert saved == (same("2.00"), same("1.50"), same("1.000"), same("0.500"))
        assert loaded == (same("4.00"), same("0.75"), same("0.500"), same("0.375"))
        assert [row[0] for row in table.rows] == ["ours", "peer", "peer, mmap", WRITE, READ, COPY]
        assert table.rows[2][1:5] == ("",) * 4
        assert [bool(row[1]) for row in table.rows[3:]] == [True, False, True]
        assert [bool(row[5]) for row in table.rows[3:]] == [False, True, True]

    def test_memory(self) -> None:
        ours = measured("ours", a_reading(), a_reading(rise=30 * MB, charged=31 * MB, spare=5 * MB))
        peer = measured("peer", a_reading(spare=None), a_reading(spare=None, before=2 * GB))
        table = tables.memory("known", {"ours": ours, "peer": peer})
        both = "3.000 + 3.000"
        assert table.rows == [
            ("ours", "1.000", "10", "30", "20", "31", "5", both, both),
            ("peer", "2.000", "10", "10", "20", "20", "", both, both),
        ]

    def test_beside_a_peer(self) -> None:
        ours = measured("ours", a_reading(2.0), a_reading(2.0, charged=21 * MB))
        slow = a_reading(3.0, charged=200 * MB)
        peer = measured("peer", slow, slow, mmap=a_reading(1.5, charged=200 * MB))
        verdicts = {verdict.what.partition(":")[0]: verdict for verdict in tables.beside(ours, peer)}
        assert {subject: verdict.holds for subject, verdict in verdicts.items()} == {
            "time of saving": True,
            "memory of saving, page cache included": True,
            "time of loading": False,  # the faster way counts
            "memory of loading, page cache included": False,
        }
        assert verdicts["memory of loading, page cache included"].found == "0.105 (21 of 200 MB)"

    @pytest.mark.parametrize(("seconds", "holds"), [(2.49, True), (2.51, False)])
    def test_beside_dd(self, seconds: float, holds: bool) -> None:
        verdict = tables.at_rate("saving", [a_reading(seconds)] * 3, COPY, self.DISK[COPY])
        assert verdict.holds is holds

    def test_the_ceiling_holds_in_every_round(self) -> None:
        ours = measured("ours", a_reading(), a_reading(spare=0))
        assert tables.below_ceiling(ours).holds
        ours.trips.append(Trip(a_reading(), {"": a_reading(spare=-MB)}))
        assert tables.below_ceiling(ours).found == "1 MB above the ceiling"
        assert not tables.below_ceiling(ours).holds


class TestBackground:
    @pytest.fixture
    def side(self) -> Trained:
        """A save adds 3 s in the foreground and 1 s in the background, where two steps take 1.5 s each."""
        figures = {"called": 0.1, "saved": 2.5, "stalled": 0.5, "steps": 2, "meanwhile": 3.0}
        rounds = {
            background.WITHOUT: [a_reading(4.0), a_reading(5.0, spare=4 * MB)],
            background.BEHIND: [a_reading(7.0), a_reading(8.0)],
            background.DURING: [a_reading(5.0, figures=figures), a_reading(6.0, figures=figures)],
        }
        return Trained(sides.RAM, {}, 4, rounds)

    def test_what_a_save_adds_is_by_round(self, side: Trained) -> None:
        (row,) = background.table([side]).rows
        assert row == (
            *(sides.RAM, "4", "1.125 (1.000-1.250)", "3.00 (3.00-3.00)", "1.00 (1.00-1.00)", "0.33"),
            *(
                "0.50 (0.50-0.50)",
                "0.100 (0.100-0.100)",
                "2.50 (2.50-2.50)",
                "2 (2-2)",
                "1.500 (1.500-1.500)",
            ),
        )
        assert background.cheaper(side).holds

    def test_in_the_background_it_must_cost_less(self, side: Trained) -> None:
        side.rounds[background.DURING] = side.rounds[background.BEHIND]
        assert not background.cheaper(side).holds

    def test_the_ceiling_is_that_of_all_rounds(self, side: Trained) -> None:
        assert side.spare == 4 * MB


def test_snapshots_are_cheap_and_adopted_ones_start_sooner() -> None:
    def clocked(seconds: float, written: float = 0) -> dict[str, float]:
        return {"seconds": seconds, "read": 0, "written": written}

    def resumed(loaded: float) -> dict[str, Any]:
        return {"started": 1.0, "loaded": clocked(loaded), "step": clocked(0.5)}

    side = snapshots.Snapshots(
        "ours",
        {"snapshot_bytes": MB, "planned_read": 0, "planned_written": 0},
        [clocked(1.0)],
        [clocked(snapshots.MOST_SECONDS, MB)],
        [clocked(2.0, 9 * MB)],
        {"adopted": [resumed(0.1)], "copied": [resumed(0.2)]},
    )
    assert snapshots.totals(side.resumes["copied"]) == [pytest.approx(1.7)]
    assert [each.holds for each in snapshots.verdicts(side)] == [True, True, True]
    side.snapshots[0] = clocked(snapshots.MOST_SECONDS + 0.01, 1.03 * MB)
    side.resumes["copied"] = side.resumes["adopted"]
    assert [each.holds for each in snapshots.verdicts(side)] == [False, False, False]


@pytest.mark.slow
def test_everything_runs(command: Callable[..., tuple[int, str, Any, str]]) -> None:
    status, text, raw, _ = command("bench_checkpoint.py", "--quick")
    assert status in (0, 1)
    assert raw["skipped"] == []
    goals = " / ".join(goal["what"] for goal in raw["goals"])
    for expected in (COPY, "peak RSS", sides.TORCH, sides.DCP):
        assert expected in goals
    assert goals.count("peak RSS of saving and loading") == 3
    assert goals.count("peak RSS of training and saving") == 2
    assert "save and load, 2 ranks" in text
    assert "start to first step: adopted / copied" in goals and "resumes from a snapshot" in text
