"""Log records of several ranks: the rank in them, messages of rank 0 only, and the program's own configuration."""

from __future__ import annotations

import io
import logging

import pytest
from torch import nn

import tiering
from tiering import _logs
from tiering.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_set(logging_as_before: None) -> None:
    """The project's loggers are as in a program that has just started."""
    for name in (*_logs.LOGGERS, _logs.PROGRESS):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).handlers = []


def test_our_records_name_their_rank_and_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    _logs.set_rank(3, 4)
    logging.getLogger("zero3.engine.engine").warning("skipped %d of %s", 2, "100 %")
    logging.getLogger("tiering").warning("100 % alone")
    logging.getLogger("tieringx").warning("other")
    assert caplog.messages == ["[rank 3] skipped 2 of 100 %", "[rank 3] 100 % alone", "other"]
    assert [getattr(record, "rank", None) for record in caplog.records] == [3, 3, None]


def test_one_rank_alone_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    _logs.set_rank(1, 2)
    _logs.set_rank(0, 1)  # a second engine in the same process, this time alone
    logging.getLogger("optim_cpu").warning("said")
    assert caplog.messages == ["said"]
    assert caplog.records[0].rank == 0


def test_marks_do_not_pile_up(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        _logs.set_rank(1, 2)
    logging.getLogger("tiering").warning("said")
    assert caplog.messages == ["[rank 1] said"]


def test_the_programs_record_factory_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    class ProgramRecord(logging.LogRecord):
        pass

    logging.setLogRecordFactory(ProgramRecord)
    _logs.set_rank(1, 2)
    logging.getLogger("tiering").warning("said")
    assert isinstance(caplog.records[0], ProgramRecord)


@pytest.mark.parametrize(("rank", "level"), [(0, logging.INFO), (1, logging.DEBUG)])
def test_what_all_would_say_rank_0_says(caplog: pytest.LogCaptureFixture, rank: int, level: int) -> None:
    caplog.set_level(logging.DEBUG, "tiering")
    assert _logs.once(logging.INFO) == logging.INFO  # set_rank() has not been called
    _logs.set_rank(rank, 2)
    logging.getLogger("tiering.placement.plan").log(_logs.once(logging.INFO), "the plan")
    (record,) = caplog.records
    assert (record.levelno, record.funcName) == (level, "test_what_all_would_say_rank_0_says")


def test_the_variable_sets_the_level_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    for _ in range(2):
        _logs.follow({"TIERING_LOG": "Info"})
    logging.getLogger("tiering.storage.swap_space").info("swap space")
    logging.getLogger("tiering.storage.swap_space").debug("too much")
    logging.getLogger("another").info("silent")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" INFO ")[2] for line in lines] == ["tiering.storage.swap_space: swap space"]


@pytest.mark.parametrize(("level", "count"), [("", 1), ("debug", 1), ("warning", 0)])
def test_what_was_asked_for_is_said_once_unless_the_variable_forbids_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: str, count: int
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    _logs.progress()  # as an earlier engine may have called it
    _logs.follow({"TIERING_LOG": level})
    _logs.progress().info("step 10")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" INFO ")[2] for line in lines] == ["tiering.progress: step 10"] * count


@pytest.mark.parametrize("name", ["tiering", "tiering.progress"])
def test_a_level_of_the_programs_holds_for_what_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger(name).setLevel(logging.ERROR)
    _logs.progress().info("step 10")
    assert capsys.readouterr().err == ""


def test_what_was_asked_for_goes_to_the_programs_handlers_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(text)])
    monkeypatch.setattr(root, "level", logging.WARNING)  # as basicConfig() leaves it
    _logs.progress().info("step 10")
    _logs.progress().debug("what rank 1 says")
    assert (text.getvalue(), capsys.readouterr().err) == ("step 10\n", "")


def test_handlers_of_the_program_come_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _logs.follow({"TIERING_LOG": "debug"})
    text = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(text)])
    logging.getLogger("zero3.observe.trace").debug("said")
    assert (text.getvalue(), capsys.readouterr().err) == ("said\n", "")


def test_without_the_variable_nothing_changes() -> None:
    before = [
        (logging.getLogger(name).level, list(logging.getLogger(name).handlers)) for name in _logs.LOGGERS
    ]
    _logs.follow({})
    _logs.follow({"TIERING_LOG": ""})
    assert before == [
        (logging.getLogger(name).level, list(logging.getLogger(name).handlers)) for name in _logs.LOGGERS
    ]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="TIERING_LOG is 'loud'; use one of debug, info, warning, error"):
        _logs.follow({"TIERING_LOG": "loud"})


def test_initialize_follows_the_variable_before_it_reads_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERING_LOG", "loud")
    with pytest.raises(ConfigError, match="TIERING_LOG is 'loud'"):
        tiering.initialize(model=nn.Linear(1, 1), config={})
