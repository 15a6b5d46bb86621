"""Severing: the connections of process groups are broken, so that no thread waits for a rank that is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import ProcessGroup

log = logging.getLogger(__name__)

SEVERING_TAG = 0x7EE5  # a tag that no message has
SEVERING_TIMEOUT = 60.0  # seconds


def sever(groups: Iterable[ProcessGroup]) -> None:
    """Break the connections of ``groups``, so that a collective that cannot end keeps no thread waiting.

    On one thread for each group, all at once: NCCL's abort of a communicator may wait for the whole device, on which
    the kernel of another communicator hangs. An abort may also never return. Then a thread that waits for the device
    hangs forever, but the calling thread continues after ``SEVERING_TIMEOUT``.
    """
    threads = [
        threading.Thread(target=_sever, args=(group,), name="sever a group of ranks", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SEVERING_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.error("connections with other ranks could not be closed within %.0f s", SEVERING_TIMEOUT)


def _sever(group: ProcessGroup) -> None:
    """Break the connections of one group.

    Gloo's ``abort`` does nothing, and its destructor waits for pending operations up to the group's time-out: minutes
    or more if another rank is frozen. But a receive that times out closes its connection, with all operations on it.
    """
    if group.name() != "gloo":
        try:
            group.abort()
        except RuntimeError as error:
            log.error("a communicator could not be aborted: %s", error)
        return
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                # Nobody sends this message: the receive times out, and takes the connection with it.
                group.recv([torch.empty(1, device="cpu")], rank, SEVERING_TAG).wait(timedelta(milliseconds=1))
