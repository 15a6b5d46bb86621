"""Measured rates, kept for a week in the user's cache: to measure takes ten seconds, and gigabytes written to a drive.

There is a file for each measurement, ``$XDG_CACHE_HOME/tiering/rates/disks-1f0c....json``, whose name has a hash of all
that the rates depend on, and which repeats that in full. What it says counts for nothing else: a home may be shared by
machines, a drive replaced, a kernel updated. A file appears whole or not at all, so nobody has to lock.
What was measured while others took much of the CPUs is fresh for an hour only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Container
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tiering import strict_json
from tiering.errors import ConfigError
from tiering.planning.conditions import Conditions
from tiering.planning.measure import Measurement, Tell, quietly
from tiering.planning.others import WORTH_A_WORD, Others
from tiering.planning.rates import Rates
from tiering.strict_json import FormatError

SCHEMA = 1
FRESH = timedelta(days=7)
# Shorter than FRESH: the next measurement runs beside the same processes.
FRESH_BESIDE_OTHERS = timedelta(hours=1)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Rates, when they were measured, and the share of the CPUs that others took meanwhile."""

    rates: Rates
    measured: datetime
    others: float = 0.0

    @property
    def age(self) -> timedelta:
        return datetime.now(UTC) - self.measured

    @property
    def fresh(self) -> bool:
        """Whether it is as good as measured now; a time to come is no time at which anything was measured."""
        return timedelta() <= self.age <= (FRESH_BESIDE_OTHERS if self.others >= WORTH_A_WORD else FRESH)


def measured(measurement: Measurement, tell: Tell = quietly) -> Record:
    """Those of now."""
    others = Others()
    rates = measurement.run(tell)
    return Record(rates, datetime.now(UTC), others.share())


class SavedRates:
    """The records below ``cache``. What cannot be read or written is done without; the first such thing is told."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "tiering" / "rates"
        self._told = False

    @classmethod
    def of_user(cls) -> SavedRates:
        """Those of the user that this process runs as."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():  # its specification says that it does not count then
            try:
                cache = Path.home() / ".cache"
            except RuntimeError:  # of a user that nobody knows, as containers have them
                cache = Path("/nonexistent/.cache")
        return cls(cache)

    def path(self, measurement: Measurement) -> Path:
        """Where the rates of ``measurement`` are kept."""
        digest = hashlib.sha256(_canonical(measurement.conditions).encode()).hexdigest()
        return self.directory / f"{measurement.name.lower()}-{digest[:32]}.json"

    def find(self, measurement: Measurement) -> Record | None:
        """What was measured under the very same conditions, and is still fresh."""
        record = self._read_file(self.path(measurement), measurement.conditions)
        return record if record is not None and record.fresh else None

    def _read_file(self, path: Path, conditions: Conditions, but_for: Container[str] = ()) -> Record | None:
        """The record in a file, if it is there, can be trusted, and is of ``conditions``."""
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():  # where others may write, too
                    raise FormatError("it belongs to another user")
                return _read(file.read(), conditions, but_for)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError, ConfigError) as error:
            self._warn(f"the rates saved in {path} are not used: {_reason(error)}")
            return None

    def find_like(self, measurement: Measurement, *, but_for: Container[str]) -> Record | None:
        """The last that was measured and is still fresh, ``but_for`` these conditions under the same ones."""
        found = []
        for path in sorted(self.directory.glob(f"{measurement.name.lower()}-*.json")):
            record = self._read_file(path, measurement.conditions, but_for)
            if record is not None and record.fresh:
                found.append(record)
        return max(found, key=lambda record: record.measured, default=None)

    def save(self, measurement: Measurement, record: Record) -> Path | None:
        """Keep what was just measured; returns where, None if that was not possible."""
        path = self.path(measurement)
        text = json.dumps(
            {
                "schema": SCHEMA,
                "measured": record.measured.isoformat(timespec="seconds"),
                "others": record.others,
                "rates": record.rates.as_dict(),
                "conditions": measurement.conditions,
            },
            indent=1,
        )
        try:
            for directory in (*reversed(self.directory.parents[:2]), self.directory):
                directory.mkdir(mode=0o700, exist_ok=True)
            _replace(path, text + "\n")
        except OSError as error:
            self._warn(f"the rates could not be saved in {path}: {_reason(error)}")
            return None
        return path

    def _warn(self, what: str) -> None:
        if not self._told:
            log.warning("%s; they are measured each time", what)
        self._told = True


def _read(content: bytes, conditions: Conditions, but_for: Container[str]) -> Record | None:
    """The record of ``conditions``, None if it is another version's or of others. Raises ValueError or ConfigError."""
    told = strict_json.parse(content)
    theirs = told.get("conditions")
    if told.get("schema") != SCHEMA or not isinstance(theirs, dict):
        return None
    if _canonical(_without(theirs, but_for)) != _canonical(_without(conditions, but_for)):
        return None
    rates, measured, others = (told.get(name) for name in ("rates", "measured", "others"))
    if not isinstance(rates, dict) or not isinstance(measured, str) or not isinstance(others, float):
        raise FormatError("it has no rates, or does not say when they were measured, or beside whom")
    when = datetime.fromisoformat(measured)
    if when.tzinfo is None:
        raise FormatError(f"it was measured at {measured!r}, in nobody knows which time zone")
    return Record(Rates.from_dict(rates), when, others)


def _without(conditions: Conditions, names: Container[str]) -> Conditions:
    return {name: value for name, value in conditions.items() if name not in names}


def _canonical(conditions: object) -> str:
    """As text that is the same for what is the same once it was written and read."""
    return json.dumps(conditions, sort_keys=True)


def _replace(path: Path, text: str) -> None:
    """Let ``path`` be ``text``, for this user's eyes; readers see all of it or what was there before."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".rates-")  # 0600
    partial = Path(name)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
