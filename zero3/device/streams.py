"""Streams and events of a device whose work is queued: the part of CUDA that the engine uses.

The CPU queues work for the device and runs ahead of it. Work on one stream runs in the order in which it was queued.
Between two streams, and between a stream and the CPU, only events set an order. Code that moves bytes names the events
that the bytes wait for. All of the engine's knowledge of CUDA's streams is in this file.

The CPU as a device has no ``Streams``: its work is done when the call returns.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Event(ABC):
    """The end of all work that a stream had queued when the event was recorded. A lease can retire on it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether this work has run. Never waits."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int:
        """Let the CPU wait until this work has run."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Device seconds between two timed events that are done; 0 if ``earlier`` is the later one."""


class Stream(ABC):
    """A queue of work of the device."""

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """An event behind all work that is queued now."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Run all work that is queued from now on after ``event``. The CPU does not wait."""

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """A context manager: torch operations in its block are queued on this stream."""

    @abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor``, which torch allocated for another stream, for the work queued here so far.

        Torch does not allocate this memory again before that work has run, even if the last reference disappears.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Let the CPU wait until all queued work has run."""


class Streams(ABC):
    """The streams of a device. Each kind of work has its own, so that all kinds run in parallel."""

    fetch: Stream
    """To the device: parameters, and state that is updated there."""
    offload: Stream
    """From the device: gradients, and state that was updated there."""
    update: Stream
    """Kernels of the optimizer that run in parallel with compute."""
    save: Stream
    """From the device, into checkpoints."""
    gather: Stream
    """Between ranks: parameters."""
    reduce: Stream
    """Between ranks: gradients."""

    @property
    @abstractmethod
    def compute(self) -> Stream:
        """The stream on which torch operations of the calling thread are queued now."""

    def enter_thread(self) -> None:  # noqa: B027 # only CUDA has a device for each thread
        """Make this the device of the calling thread, for threads that torch did not create."""

    def synchronize(self) -> None:
        """Let the CPU wait for all copies and updates, before host and device memory are freed."""
        # Without gathers and reductions, because a collective that waits for a lost rank never ends. The caller calls
        # Collectives.settle before this, which aborts such collectives.
        for stream in (self.fetch, self.update, self.offload, self.save):
            stream.synchronize()

    def before_host_changes(self) -> None:
        """Let the CPU wait for the copies to the device, before it changes host memory that they may still read."""
        # Only copies on ``fetch`` read host memory. Copies that write to it, on ``offload`` and ``save``, have events
        # of their own, for which the readers of these bytes wait.
        self.fetch.synchronize()


class CudaEvent(Event):
    """An event of CUDA."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool) -> None:
        self.handle = torch.cuda.Event(enable_timing=timed)
        # Recorded at once: CUDA counts an event that was never recorded as done, and a wait for it would order nothing.
        self.handle.record(stream)

    def done(self) -> bool:
        return bool(self.handle.query())

    def wait(self, timeout: float | None = None) -> int:
        # CUDA has no wait with a limit, so ``timeout`` has no effect. Arena.lease, which otherwise checks other
        # transfers during a wait, waits for this event alone.
        self.handle.synchronize()
        return 0

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return max(0.0, float(earlier.handle.elapsed_time(self.handle)) / 1e3)


class CudaStream(Stream):
    """A stream of CUDA."""

    def __init__(self, handle: torch.cuda.Stream) -> None:
        self.handle = handle

    def record(self, *, timed: bool = False) -> Event:
        return CudaEvent(self.handle, timed=timed)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.handle.wait_event(event.handle)

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.handle)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.handle)

    def synchronize(self) -> None:
        self.handle.synchronize()


class CudaStreams(Streams):
    """Side streams of a GPU, in addition to the stream on which the program computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, which queues copies behind compute: copies do not overlap compute;"
                " unset it"
            )
        # Streams from torch's pool do not synchronize with CUDA's default stream, on which most programs compute. So
        # only events order them: a copy without an event may run before the kernel that makes its bytes.
        ordinary_streams = [CudaStream(torch.cuda.Stream(device)) for _ in range(4)]
        self.fetch, self.offload, self.update, self.save = ordinary_streams
        # With priority, the few blocks of a collective's kernel start while a matmul runs, and not after it.
        urgent_streams = [CudaStream(torch.cuda.Stream(device, priority=-1)) for _ in range(2)]
        self.gather, self.reduce = urgent_streams

    def enter_thread(self) -> None:
        # Even a query of an event makes a context on the thread's device, which is GPU 0 by default.
        torch.cuda.set_device(self._device)

    @property
    def compute(self) -> Stream:
        # Read at each use: the program may change its stream, and autograd runs each node on the stream of its forward.
        return CudaStream(torch.cuda.current_stream(self._device))


def streams_of(device: torch.device) -> Streams | None:
    """The streams of ``device``; None for the CPU, which queues no work."""
    return CudaStreams(device) if device.type == "cuda" else None
