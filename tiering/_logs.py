"""The project's loggers: the rank in each record, the level from TIERING_LOG, and messages of one rank only.

Handlers, formats and levels belong to the program. The rank is added by a record factory around the installed one: a
filter on a logger does not see the records of its children, and a filter on a handler would need a handler of this
project. Records of other libraries are not changed.

    TIERING_LOG=info torchrun ...      levels: debug, info, warning, error

Lines that the configuration requests, for example with steps_per_print, go to a separate logger, ``progress()``, whose
INFO level is on by default.
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
    """Give the records of this project an attribute ``rank``, and with several ranks the prefix "[rank 1] "."""
    factory = logging.getLogRecordFactory()
    if isinstance(factory, _RankRecordFactory):
        factory = factory.wrapped
    logging.setLogRecordFactory(_RankRecordFactory(factory, rank, world_size))


def once(level: int) -> int:
    """The level of a message that is equal on all ranks: ``level`` on rank 0, DEBUG on the others.

    log.log(logs.once(logging.INFO), "%s", plan)
    """
    factory = logging.getLogRecordFactory()
    return level if not isinstance(factory, _RankRecordFactory) or factory.rank == 0 else logging.DEBUG


def follow(environ: Mapping[str, str]) -> None:
    """Set the project's loggers to the level in TIERING_LOG, if it is set. Raises ConfigError for an unknown level.

    Their records then go to stderr, unless the program has handlers of its own, now or later.
    """
    level = environ.get(VARIABLE)
    if not level:
        return
    if level.lower() not in LEVELS:
        raise ConfigError(f"{VARIABLE} is {level!r}; use one of {', '.join(LEVELS)}")
    for name in (*LOGGERS, PROGRESS):
        logger = logging.getLogger(name)
        logger.setLevel(LEVELS[level.lower()])
        _show(logger)


def progress() -> logging.Logger:
    """The logger of requested output: INFO is shown on stderr, unless the program has handlers of its own.

    A level that TIERING_LOG or the program has set for this logger or for "tiering" has precedence.
    """
    logger = logging.getLogger(PROGRESS)
    if logger.level == logging.getLogger("tiering").level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    _show(logger)
    return logger


def _show(logger: logging.Logger) -> None:
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())


class _RankRecordFactory:
    """Creates records with the factory ``wrapped``, and adds the rank to those of this project."""

    def __init__(self, wrapped: Any, rank: int, world_size: int) -> None:
        self.wrapped = wrapped
        self.rank = rank
        self.prefix = f"[rank {rank}] " if world_size > 1 else ""

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self.wrapped(name, *args, **kwargs)
        if name.partition(".")[0] in LOGGERS:
            record.rank = self.rank
            record.msg = f"{self.prefix}{record.msg}"
        return record


class _ToStderr(logging.Handler):
    """Writes to stderr if no other handler takes the record, like logging.lastResort, but at every level.

    If several of these handlers get a record, the one nearest to its logger writes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        handlers = list(_handlers(record.name))
        if handlers[0] is not self or not all(isinstance(handler, _ToStderr) for handler in handlers):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):
            # stderr is closed, or a file on a full disk.
            self.handleError(record)


def _handlers(name: str) -> Iterator[logging.Handler]:
    """The handlers that get records of the logger ``name``: its own, and those of its ancestors."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
