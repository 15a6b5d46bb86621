"""The clocks of phases and stalls: on a CPU, and on a device that does its work later."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.fakes.queued_device import Mark, QueuedDevice
from zero3.device import timeline


def test_waits_are_told_by_the_phase_in_which_they_began_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(timeline, "time", SimpleNamespace(monotonic_ns=lambda: now))
    clock = timeline.StallClock(timeline.Timeline())

    def wait(cause: str, seconds: int) -> None:
        nonlocal now
        with clock.waiting_for(cause):
            now += seconds * 10**9

    wait("agreement", 1)
    clock.phase = "forward"
    wait("parameters", 2)
    with clock.waiting_for("checkpoint"):
        clock.phase = "step"
        wait("agreement", 4)  # for the checkpoint, too
        other = threading.Thread(target=wait, args=("parameters", 8))
        other.start()
        other.join()
    with pytest.raises(KeyError), clock.waiting_for("staging"):
        raise KeyError
    wait("parameters", 16)
    assert clock.by_phase() == {
        "idle": {"agreement": 1.0},
        "forward": {"parameters": 2.0, "checkpoint": 12.0},
        "step": {"parameters": 24.0, "staging": 0.0},
    }
    assert clock.seconds == {"agreement": 1.0, "parameters": 26.0, "checkpoint": 12.0, "staging": 0.0}


def test_a_wait_counts_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(timeline, "time", SimpleNamespace(monotonic_ns=lambda: now))
    clock = timeline.StallClock(timeline.Timeline())
    begun, over = threading.Barrier(3), threading.Event()

    def wait(cause: str) -> None:
        with clock.waiting_for(cause), clock.waiting_for("within"):
            begun.wait(20)
            over.wait(20)

    clock.phase = "forward"
    waiting = [threading.Thread(target=wait, args=(cause,)) for cause in ("parameters", "agreement")]
    for thread in waiting:
        thread.start()
    begun.wait(20)
    clock.phase = "backward"
    for now in (10**9, 3 * 10**9):  # nobody has stopped to wait yet
        assert clock.by_phase() == {"forward": {"parameters": now / 1e9, "agreement": now / 1e9}}
    over.set()
    for thread in waiting:
        thread.join()
    now = 9 * 10**9
    assert clock.seconds == {"parameters": 3.0, "agreement": 3.0}


def test_on_a_device_phases_are_its_own_and_told_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueuedDevice(monkeypatch)
    clock = timeline.PhaseClock(device)
    device.works(100)
    for _ in range(2):  # in no time; between the steps the program reads the loss
        clock.enter("forward")
        device.works(2)
        clock.enter("backward")
        device.works(4)
        clock.enter("step")
        device.works(1)
        clock.enter("idle")
        assert (clock.phase, clock.seconds) == ("idle", {"idle": 0.0})
    device.passes(106)
    assert clock.seconds == pytest.approx({"forward": 2.0, "backward": 4.0, "idle": 0.0})
    device.passes(8 + 3)  # it has nothing to do for the last three of them
    clock.enter("forward")
    device.works(2)
    clock.enter("backward")
    assert clock.seconds == pytest.approx({"forward": 4.0, "backward": 8.0, "step": 2.0, "idle": 3.0})


def test_on_a_device_a_stall_is_what_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU waits for what the device is not out of work for, and runs ahead of what the device waits for."""
    device = QueuedDevice(monkeypatch)
    clock = timeline.StallClock(timeline.Timeline(), device)
    readings: list[dict[str, dict[str, float]]] = []

    def look() -> dict[str, dict[str, float]]:
        seconds_by_phase = clock.by_phase()
        for phase, causes in (readings[-1] if readings else {}).items():
            assert all(seconds_by_phase[phase][cause] >= seconds for cause, seconds in causes.items())
        readings.append(seconds_by_phase)
        return {
            phase: {cause: pytest.approx(seconds) for cause, seconds in causes.items() if seconds}
            for phase, causes in seconds_by_phase.items()
        }

    clock.phase = "forward"
    device.works(5)
    with clock.waiting_for("parameters"):
        device.passes(3)
        assert look() == {"forward": {}}, "it has work for two seconds more"
    with clock.waiting_for("parameters"):
        device.passes(3)
        look()  # it is seen to have run dry, a second late
        device.passes(2)
        assert look() == {"forward": {"parameters": 2.0}}, "while it goes on: no more than is known"
    assert look() == {"forward": {"parameters": 3.0}}
    # A copy that ends in four seconds, and one for computing before it is waited for.
    device.works(1)
    clock.hold(Mark(device, device.now + 4 * 10**9), "copies of parameters")
    clock.phase = "backward"
    assert look() == {"forward": {"parameters": 3.0}}
    device.passes(2)
    look()
    device.passes(1)
    assert look() == {"forward": {"parameters": 3.0, "copies of parameters": 1.0}}
    device.passes(6)
    assert look() == {"forward": {"parameters": 3.0, "copies of parameters": 3.0}}
    # A wait of the CPU, and in it one for the copy of what it waited for: told apart, and not twice.
    with clock.waiting_for("parameters"):
        device.passes(2)
        clock.hold(Mark(device, device.now + 5 * 10**9), "copies of parameters")
        with clock.waiting_for("gradients"):
            device.passes(6)
    device.passes(1)
    assert look() == {
        "forward": {"parameters": 3.0, "copies of parameters": 3.0},
        "backward": {"parameters": 3.0, "copies of parameters": 5.0},
    }
