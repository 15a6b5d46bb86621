"""Every exception this project raises on purpose.

    TieringError                  the root: catch this to catch them all
    |-- ConfigError               TIER-CONFIG   a key or value in the configuration is wrong
    |-- PlacementError            TIER-PLAN     what was asked for does not fit the budgets
    |-- SwapSpaceError            TIER-SPACE    the NVMe directory cannot hold the swap file
    |-- UnsafeTargetError         TIER-UNSAFE   a benchmark there could do harm, or would not measure what it says
    |-- SwapError (OSError)       TIER-IO       a transfer between memory and NVMe failed
    |-- ArenaError                TIER-ARENA    the pinned arena cannot serve a lease it was planned for
    |-- TelemetryError            TIER-TELEMETRY  the run directory cannot hold pages
    |-- WeightsError              TIER-WEIGHTS  files of weights are damaged, or are not this model's
    |-- CheckpointError           TIER-CHECKPOINT  a checkpoint cannot be written, is damaged, or is another model's
    |-- EngineStateError          TIER-STATE    a call came in an order the engine cannot honour
    |-- ResidencyError            TIER-RESIDENT state was touched where it does not live now
    `-- DistributedError          TIER-RANKS    the ranks of a run can go no further together
        |-- RankLostError         TIER-RANK-LOST   a rank has died, failed or closed its engine
        `-- RankOrderError        TIER-RANK-ORDER  ranks are about to enter different collectives

A message names the object, the state it was in and the remedy; its code is stable, so that it can be searched for.
"""

from __future__ import annotations


class TieringError(Exception):
    """Root of all errors raised by this project. ``code`` is stable across versions.

    ``words`` are the message without it.
    """

    code = "TIER"

    def __init__(self, message: str) -> None:
        super().__init__(f"[{self.code}] {message}")
        self.words = message


class ConfigError(TieringError):
    """A configuration key or value is wrong, unknown, or asks for what this version does not do."""

    code = "TIER-CONFIG"


class PlacementError(TieringError):
    """The model and the budgets do not fit together; the message carries the numbers and the remedy."""

    code = "TIER-PLAN"


class SwapSpaceError(TieringError):
    """The swap directory is missing, not writable, of an unsuitable file system, or too full."""

    code = "TIER-SPACE"


class UnsafeTargetError(TieringError):
    """A benchmark in that place could do harm, or would not measure what it says."""

    code = "TIER-UNSAFE"


class SwapError(TieringError, OSError):
    """A transfer failed. ``errno``, ``filename``, ``offset`` (bytes) and ``names`` (tensors) say which."""

    code = "TIER-IO"

    def __init__(
        self, message: str, *, errno: int, filename: str, offset: int, names: tuple[str, ...] = ()
    ) -> None:
        TieringError.__init__(self, message)
        self.errno = errno
        self.filename = filename
        self.offset = offset
        self.names = names

    def __str__(self) -> str:  # OSError would print errno and file name instead of the message
        return str(self.args[0])


class NotDoneError(TimeoutError):
    """A wait with a time limit ended before what it waits for. No other timeout, as a signal handler raises, is one."""


class ArenaError(TieringError):
    """A lease was asked for that the arena can never serve."""

    code = "TIER-ARENA"


class TelemetryError(TieringError):
    """The run directory cannot hold pages, or a page cannot be written."""

    code = "TIER-TELEMETRY"


class WeightsError(TieringError):
    """Files of weights are not what they say they are, cannot be read, or do not belong to the model.

    ``what`` is that, without the remedy: whoever wanted something else of the files knows another one.
    """

    code = "TIER-WEIGHTS"

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what


class CheckpointError(TieringError):
    """A checkpoint could not be written whole, is damaged or missing, or does not belong to the model."""

    code = "TIER-CHECKPOINT"


class EngineStateError(TieringError):
    """The engine was called in an order it cannot honour (for example ``step`` after ``close``)."""

    code = "TIER-STATE"


class ResidencyError(TieringError):
    """A tensor was used while its bytes live on another tier."""

    code = "TIER-RESIDENT"


class DistributedError(TieringError):
    """The ranks cannot go on together: none of them moves, or what they meet at is out of reach.

    Final for the engine, as its subclasses are: all ranks get the same reason, and what is left is to close."""

    code = "TIER-RANKS"


class RankLostError(DistributedError):
    """Another rank has died, gone silent, failed or closed its engine. The message names the first one that did."""

    code = "TIER-RANK-LOST"


class RankOrderError(DistributedError):
    """Ranks called their modules in different orders, so that their next collectives do not belong together."""

    code = "TIER-RANK-ORDER"
