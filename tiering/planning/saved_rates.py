"""Saves measured rates for a week in the user's cache: a measurement takes ten seconds and writes gigabytes to a drive.

Each measurement has a file, ``$XDG_CACHE_HOME/tiering/rates/disks-1f0c....json``. Its name has a hash of all conditions
that the rates depend on, and it contains these conditions in full. It is valid under these conditions only: machines
may share a home, a drive may be replaced, a kernel updated. Files are replaced atomically, so no lock is needed.
Rates that were measured while other processes used much of the CPUs are valid for one hour only.
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

from tiering import _strict_json
from tiering._strict_json import FormatError
from tiering.errors import ConfigError
from tiering.planning.conditions import Conditions
from tiering.planning.measure import Measurement, Tell, quietly
from tiering.planning.others import WORTH_A_WORD, Others
from tiering.planning.rates import Rates

SCHEMA = 2
FRESH = timedelta(days=7)
# Not zero: a measurement right after it would probably run with the same other processes.
FRESH_BESIDE_OTHERS = timedelta(hours=1)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Rates, the time of their measurement, and the fraction of the CPUs that other processes used meanwhile."""

    rates: Rates
    measured: datetime
    others: float = 0.0

    @property
    def age(self) -> timedelta:
        return datetime.now(UTC) - self.measured

    @property
    def fresh(self) -> bool:
        """Whether the record can replace a measurement; a record from the future cannot."""
        return timedelta() <= self.age <= (FRESH_BESIDE_OTHERS if self.others >= WORTH_A_WORD else FRESH)


def measured(measurement: Measurement, tell: Tell = quietly) -> Record:
    """Runs ``measurement`` and returns its record."""
    others = Others()
    rates = measurement.run(tell)
    return Record(rates, datetime.now(UTC), others.share())


class SavedRates:
    """The records below ``cache``. Files that cannot be read or written are ignored; the first one logs a warning."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "tiering" / "rates"
        self._has_warned = False

    @classmethod
    def of_user(cls) -> SavedRates:
        """The records of the user of this process."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification ignores relative paths.
        if not cache.is_absolute():
            try:
                cache = Path.home() / ".cache"
            except RuntimeError:
                # The user has no entry in the user database, as in some containers.
                cache = Path("/nonexistent/.cache")
        return cls(cache)

    def path(self, measurement: Measurement) -> Path:
        """The file of the rates of ``measurement``."""
        digest = hashlib.sha256(_canonical(measurement.conditions).encode()).hexdigest()
        return self.directory / f"{measurement.name.lower()}-{digest[:32]}.json"

    def find(self, measurement: Measurement) -> Record | None:
        """The record with the same conditions, if it is fresh."""
        record = self._read_file(self.path(measurement), measurement.conditions)
        return record if record is not None and record.fresh else None

    def _read_file(self, path: Path, conditions: Conditions, but_for: Container[str] = ()) -> Record | None:
        """The record in the file ``path``, if it exists, belongs to this user and has these ``conditions``."""
        try:
            with path.open("rb") as file:
                # Other users may be able to write to the directory.
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    raise FormatError("it belongs to another user")
                return _read(file.read(), conditions, but_for)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError, ConfigError) as error:
            self._warn(f"the rates saved in {path} are not used: {_reason(error)}")
            return None

    def find_like(self, measurement: Measurement, *, but_for: Container[str]) -> Record | None:
        """The newest fresh record whose conditions are equal except those named in ``but_for``."""
        records = []
        for path in sorted(self.directory.glob(f"{measurement.name.lower()}-*.json")):
            record = self._read_file(path, measurement.conditions, but_for)
            if record is not None and record.fresh:
                records.append(record)
        return max(records, key=lambda record: record.measured, default=None)

    def save(self, measurement: Measurement, record: Record) -> Path | None:
        """Writes ``record``; returns its path, or None if it could not be written."""
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

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            log.warning("%s; each command measures them again", problem)
        self._has_warned = True


def _read(content: bytes, conditions: Conditions, but_for: Container[str]) -> Record | None:
    """The record, or None if it has another version or other conditions. Raises ValueError or ConfigError."""
    content_read = _strict_json.parse(content)
    saved_conditions = content_read.get("conditions")
    if content_read.get("schema") != SCHEMA or not isinstance(saved_conditions, dict):
        return None
    if _canonical(_without(saved_conditions, but_for)) != _canonical(_without(conditions, but_for)):
        return None
    rates, measured, others = (content_read.get(name) for name in ("rates", "measured", "others"))
    if not isinstance(rates, dict) or not isinstance(measured, str) or not isinstance(others, float):
        raise FormatError("'rates', 'measured' or 'others' is missing or has a wrong type")
    time = datetime.fromisoformat(measured)
    if time.tzinfo is None:
        raise FormatError(f"timestamp {measured!r} has no time zone")
    return Record(Rates.from_dict(rates), time, others)


def _without(conditions: Conditions, names: Container[str]) -> Conditions:
    return {name: value for name, value in conditions.items() if name not in names}


def _canonical(conditions: object) -> str:
    """Canonical JSON text, equal for equal conditions."""
    return json.dumps(conditions, sort_keys=True)


def _replace(path: Path, text: str) -> None:
    """Replaces ``path`` atomically with ``text``, readable by this user only."""
    # mkstemp creates the file with mode 0600.
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".rates-")
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
