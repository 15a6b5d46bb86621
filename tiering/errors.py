"""The exceptions of this project.

    TieringError                  the base class of all
    |-- ConfigError               TIER-CONFIG   a key or value in the configuration is wrong
    |-- PlacementError            TIER-PLAN     the model does not fit the budgets
    |-- SwapSpaceError            TIER-SPACE    the NVMe directory cannot hold the swap file
    |-- UnsafeTargetError         TIER-UNSAFE   a benchmark of the target could destroy data, or would be invalid
    |-- SwapError (OSError)       TIER-IO       a transfer between memory and NVMe failed
    |-- ArenaError                TIER-ARENA    the pinned arena can never serve a requested lease
    |-- TelemetryError            TIER-TELEMETRY  the run directory cannot be used for status files
    |-- WeightsError              TIER-WEIGHTS  weights files are damaged, or belong to another model
    |-- CheckpointError           TIER-CHECKPOINT  a checkpoint cannot be written, is damaged, or is another model's
    |-- EngineStateError          TIER-STATE    a call is not allowed in the state of the engine
    |-- ResidencyError            TIER-RESIDENT a tensor was used while it is on another tier
    |-- UnsupportedNameError (AttributeError)  TIER-NAME  a name of DeepSpeed was used that does not exist here
    `-- DistributedError          TIER-RANKS    the ranks of a run cannot continue together
        |-- RankLostError         TIER-RANK-LOST   a rank has died, failed or closed its engine
        `-- RankOrderError        TIER-RANK-ORDER  ranks are about to enter different collectives

A message names the object, its state and the remedy. The code at its start is stable, so that users can search for it.
"""

from __future__ import annotations


class TieringError(Exception):
    """Base class of all errors of this project.

    ``code`` is stable across versions. ``message`` is the text without the code.
    """

    code = "TIER"

    def __init__(self, message: str) -> None:
        super().__init__(f"[{self.code}] {message}")
        self.message = message


class ConfigError(TieringError):
    """A configuration key or value is unknown, invalid, or not supported by this version."""

    code = "TIER-CONFIG"


class PlacementError(TieringError):
    """The model does not fit the budgets; the message has the sizes and the remedy."""

    code = "TIER-PLAN"


class SwapSpaceError(TieringError):
    """The swap directory is missing, not writable, too full, or on an unsuitable file system."""

    code = "TIER-SPACE"


class UnsafeTargetError(TieringError):
    """A benchmark of the target could destroy data, or its result would be invalid."""

    code = "TIER-UNSAFE"


class SwapError(TieringError, OSError):
    """A transfer failed. ``errno``, ``filename``, ``offset`` (bytes) and ``names`` (tensors) identify it."""

    code = "TIER-IO"

    def __init__(
        self, message: str, *, errno: int, filename: str, offset: int, names: tuple[str, ...] = ()
    ) -> None:
        TieringError.__init__(self, message)
        self.errno = errno
        self.filename = filename
        self.offset = offset
        self.names = names

    def again(self, remedy: str = "") -> SwapError:
        """The same error, to be raised once more, with a further ``remedy``.

        A copy: a traceback keeps the frames of the raise, and their tensors.
        """
        return SwapError(
            self.message + remedy,
            errno=self.errno or 0,
            filename=self.filename,
            offset=self.offset,
            names=self.names,
        )

    def __str__(self) -> str:
        # OSError.__str__ would print errno and file name instead of the message.
        return str(self.args[0])


class NotDoneError(TimeoutError):
    """The time limit of a wait expired. A class of its own, because signal handlers may raise TimeoutError, too."""


class ArenaError(TieringError):
    """The arena can never serve the requested lease."""

    code = "TIER-ARENA"


class TelemetryError(TieringError):
    """The run directory cannot be used for status files, or a status file cannot be written."""

    code = "TIER-TELEMETRY"


class WeightsError(TieringError):
    """Weights files are damaged, cannot be read, or belong to another model.

    ``problem`` is the message without the remedy, for a caller with another remedy.
    """

    code = "TIER-WEIGHTS"

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


class CheckpointError(TieringError):
    """A checkpoint cannot be written, is damaged or missing, or belongs to another model."""

    code = "TIER-CHECKPOINT"


class EngineStateError(TieringError):
    """A call is not allowed in the state of the engine (for example ``step`` after ``close``)."""

    code = "TIER-STATE"


class ResidencyError(TieringError):
    """A tensor was used while its data is on another tier."""

    code = "TIER-RESIDENT"


class UnsupportedNameError(TieringError, AttributeError):
    """A name of DeepSpeed was used that does not exist here; the message has the replacement."""

    code = "TIER-NAME"


class DistributedError(TieringError):
    """The ranks cannot continue together: no rank makes progress, or the rendezvous store is not reachable.

    This error and its subclasses are final for the engine: all ranks get the same reason, and can only close it.
    """

    code = "TIER-RANKS"


class RankLostError(DistributedError):
    """Another rank has died, stopped its heartbeat, failed, or closed its engine. The message names the first one."""

    code = "TIER-RANK-LOST"


class RankOrderError(DistributedError):
    """Ranks called their modules in different orders, so that their next collectives do not match."""

    code = "TIER-RANK-ORDER"
