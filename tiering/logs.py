"""What our loggers say: from which rank, how much, and what only one rank needs to say.

Handlers, formats and levels stay the program's own. The rank is put in where records are made (a record factory around
the one that is there), for a filter on a logger does not see what its children log, and one on a handler would need
handlers of ours. Records of other libraries pass untouched.

    TIERING_LOG=info torchrun ...      levels: debug, info, warning, error

What a user has asked to see, as by steps_per_print, goes to a logger of its own, ``progress()``, which is shown without
being asked for again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tiering.errors import ConfigError

LOGGERS = ("tiering", "zero3", "optim_cpu")
PROGRESS = "tiering.progress"
VARIABLE = "TIERING_LOG"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def set_rank(rank: int, world_size: int) -> None:
    """From now on our records have an attribute ``rank``, and with several ranks begin with "[rank 1] "."""
    factory = logging.getLogRecordFactory()
    if isinstance(factory, _RankedRecords):
        factory = factory.behind
    logging.setLogRecordFactory(_RankedRecords(factory, rank, world_size))


def once(level: int) -> int:
    """The level for what every rank would say alike: ``level`` on rank 0, DEBUG on the others.

    log.log(logs.once(logging.INFO), "%s", plan)
    """
    factory = logging.getLogRecordFactory()
    return level if not isinstance(factory, _RankedRecords) or factory.rank == 0 else logging.DEBUG


def follow(environ: Mapping[str, str]) -> None:
    """Set our loggers to the level that TIERING_LOG names, if it is set; ConfigError if it names none.

    What they say then goes to stderr, unless the program has handlers of its own, now or later.
    """
    chosen = environ.get(VARIABLE)
    if not chosen:
        return
    if chosen.lower() not in LEVELS:
        raise ConfigError(f"{VARIABLE} is {chosen!r}; use one of {', '.join(LEVELS)}")
    for name in (*LOGGERS, PROGRESS):
        logger = logging.getLogger(name)
        logger.setLevel(LEVELS[chosen.lower()])
        _show(logger)


def progress() -> logging.Logger:
    """The logger of what a user has asked to see: INFO is shown on stderr, unless the program has handlers of its own.

    A level that TIERING_LOG or the program has set, here or for "tiering", holds.
    """
    logger = logging.getLogger(PROGRESS)
    if logger.level == logging.getLogger("tiering").level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    _show(logger)
    return logger


def _show(logger: logging.Logger) -> None:
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())


class _RankedRecords:
    """Makes records as ``behind`` does, and marks ours."""

    def __init__(self, behind: Any, rank: int, world_size: int) -> None:
        self.behind = behind
        self.rank = rank
        self.prefix = f"[rank {rank}] " if world_size > 1 else ""

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self.behind(name, *args, **kwargs)
        if name.partition(".")[0] in LOGGERS:
            record.rank = self.rank
            record.msg = f"{self.prefix}{record.msg}"
        return record


class _ToStderr(logging.Handler):
    """Writes where nobody else does, as logging's last resort, but at every level. Of several, the nearest one does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        handlers = list(_handlers(record.name))
        if handlers[0] is not self or not all(isinstance(handler, _ToStderr) for handler in handlers):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # closed, or a full disk behind it
            self.handleError(record)


def _handlers(name: str) -> Iterator[logging.Handler]:
    """What handles records of the logger ``name``: its own handlers, and those above it."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
