"""Preemption: after a stop signal, a run saves, and exits after its step with the code for "try again later"."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tiering import _logs
from tiering._interrupts import EXIT_SAVED, StopRequest
from tiering.checkpoint.directory import check_keep
from tiering.errors import ConfigError
from zero3.loop.step import Update

log = logging.getLogger(__name__)


class Preemption:
    """Handles stop signals. Ranks exchange them in each step, in ``updates``."""

    def __init__(self, updates: Update, *, alone: bool) -> None:
        self._updates = updates
        self._alone = alone
        self._request: StopRequest | None = None
        self._save: Callable[[], object] | None = None

    def handle(self, signals: Iterable[str], save: Callable[[], object] | None) -> None:
        """Handle ``signals`` from now on, instead of earlier ones. See Engine.save_and_exit_on."""
        self.close()
        self._request = StopRequest(signals)
        self._save = save

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        if self._request is not None:
            self._request.restore()

    @property
    def received_signal(self) -> int:
        """The number of the stop signal that this rank has received, or 0."""
        received = self._request.received if self._request is not None else ""
        return signal.Signals[received].value if received else 0

    @property
    def requested(self) -> str:
        """The name of the stop signal, which all ranks know since the same step, or ""."""
        number = self.received_signal if self._alone else self._updates.stop
        return signal.Signals(number).name if number else ""

    def save_and_exit(self, close: Callable[[], None]) -> None:
        """After a step: if a stop was requested, save, call ``close`` and raise SystemExit."""
        if self._save is None or not self.requested:
            return
        log.log(
            _logs.once(logging.WARNING),
            "%s: saving after step %d, then exit %d",
            *(self.requested, self._updates.steps, EXIT_SAVED),
        )
        self._save()
        close()
        raise SystemExit(EXIT_SAVED)


def final_save(
    save_checkpoint: Callable[..., object],
    save: Callable[[], object] | None,
    save_dir: str | os.PathLike[str] | None,
    client_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
    keep: int | None,
) -> Callable[[], object] | None:
    """The function that saves before the exit: ``save``, or ``save_checkpoint`` to ``save_dir``; None for neither.

    ConfigError for arguments that exclude each other. See Engine.save_and_exit_on.
    """
    if save_dir is not None and save is not None:
        raise ConfigError("save_and_exit_on got both save and save_dir; pass one of them")
    if save_dir is None and (client_state is not None or keep is not None):
        raise ConfigError(
            "save_and_exit_on got client_state or keep without save_dir; pass save_dir, or save client_state in save()"
        )
    check_keep(keep)
    if save_dir is None:
        return save
    directory = Path(save_dir).absolute()

    def save_there() -> object:
        state = client_state() if callable(client_state) else client_state
        return save_checkpoint(directory, client_state=state, keep=keep)

    return save_there
