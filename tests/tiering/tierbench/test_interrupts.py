"""Interruptions: noted while something is measured, and the second one ends it."""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys

import pytest

from tiering.tierbench import cli, exits
from tiering.tierbench.interrupts import Interrupts

TWICE = """
import signal, sys
from tiering.tierbench import interrupts

with interrupts.Interrupts() as told:
    signal.raise_signal(signal.{name})
    signal.raise_signal(signal.{name})
    print(told.received, flush=True)
    interrupts.REPEAT_SECONDS = 0.0
    signal.raise_signal(signal.{name})
print("went on")
"""


def test_an_interruption_is_noted_and_what_was_before_comes_back() -> None:
    with Interrupts() as outer:
        with Interrupts() as inner:
            assert not outer.received
            signal.raise_signal(signal.SIGINT)
        assert inner is outer
        assert outer.received
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with Interrupts() as later:
        assert not later.received


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as signals:
            signal.raise_signal(signal.SIGINT)
            assert not signals.received
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_one_ends_the_process_but_not_one_that_was_passed_on(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TWICE.format(name=name)], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (-getattr(signal, name), "True\n")


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_takes_its_end_as_ctrl_c(
    command: str, name: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def run(options: argparse.Namespace) -> int:
        assert options.command == f"tierbench {command} DIR"
        try:
            signal.raise_signal(name)
        except KeyboardInterrupt:
            names.append(name)
            signal.raise_signal(name)  # once more, as `timeout` does
        return exits.INTERRUPTED

    monkeypatch.setattr(importlib.import_module(f"tiering.tierbench.{cli.MODULES[command]}"), "run", run)
    before = signal.getsignal(name)
    assert cli.main([command, "DIR"]) == exits.INTERRUPTED
    assert names == [name]
    assert signal.getsignal(name) is before
