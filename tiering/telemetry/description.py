"""The static part of a status file: configuration, plan, device and versions of a rank. Frozen records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import TypeAdapter

from tiering.telemetry.figure import Figure, Integer, Label


@dataclass(frozen=True)
class SettingStatus:
    """One configuration key by its dotted path, and its value in effect ("auto" is resolved) as a JSON value.

    ``origin`` is "file" (the file sets it), "auto" (the file sets "auto") or "default" (the file does not have it).
    ``verdict`` says how the engine treats the key ("honoured", "mapped", ...), and ``note`` explains it. Secrets are
    left out.
    """

    key: str
    value: object
    origin: Literal["file", "auto", "default"]
    verdict: str = ""
    note: str = ""


@dataclass(frozen=True)
class ConfigurationStatus:
    """The configuration of a run: its file (empty for a dict), its outcome, and the number of keys by verdict.

    ``without_effect`` and ``deprecated`` are dotted keys; ``settings`` has every key, defaults included.
    """

    source: str
    outcome: str
    counts: dict[str, Integer] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    deprecated: list[str] = field(default_factory=list)
    settings: list[SettingStatus] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedTier:
    """Bytes that the plan puts on one tier of a rank, in total and by kind."""

    name: Annotated[Literal["device", "host", "nvme"], Label("tier")]
    budget: Integer
    planned: Integer
    by_kind: Annotated[
        dict[str, Integer],
        Figure(
            "Bytes that the plan puts on the tier, by what they hold.",
            "tiering_plan_tier_bytes",
            by=("kind",),
        ),
    ] = field(default_factory=dict)


_MOVED = Figure(
    "Bytes that a step moves by the plan, by what they hold: read and written over NVMe, sent to other ranks.",
    "tiering_plan_step_bytes",
    by=("kind",),
)


@dataclass(frozen=True)
class PlanStatus:
    """The plan of a rank: bytes on each tier, and bytes that a steady step moves, by kind. Both have the same kinds.

    ``moved_by_format`` maps each state format to the bytes that a step would read and write within the same budgets.
    ``host_without_nvme`` is the host budget of a rank, in bytes, that would avoid NVMe traffic with ``cache_in_host``
    true; None if no budget would, or if a step moves nothing now.
    """

    tiers: list[PlannedTier] = field(default_factory=list)
    read: Annotated[dict[str, Integer], _MOVED, Label("direction", "read")] = field(default_factory=dict)
    written: Annotated[dict[str, Integer], _MOVED, Label("direction", "write")] = field(default_factory=dict)
    sent: Annotated[dict[str, Integer], _MOVED, Label("direction", "send")] = field(default_factory=dict)
    groups: Integer = 0
    # Elements of the whole model, over all ranks.
    parameters: Integer = 0
    # Forward and backward passes per step.
    micro_batches: Integer = 1
    state_format: str = ""
    moved_by_format: dict[str, Integer] = field(default_factory=dict)
    host_without_nvme: Integer | None = None


@dataclass(frozen=True)
class Description:
    """The properties of a rank that do not change while it runs.

    ``versions`` maps a package to its version, and ``labels`` names to values: the job, the pod, those configured.
    ``links`` maps names to URLs where other tools show the run, or to the directory that they read.
    """

    # "cpu", or "cuda:0" and the name of the GPU.
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    configuration: ConfigurationStatus | None = None
    plan: PlanStatus | None = None
    labels: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The description as JSON text."""
        return _DESCRIPTION.dump_json(self).decode()

    def fitted(self, nbytes: int) -> str:
        """JSON text of at most ``nbytes``, without some settings if necessary.

        The notes of defaults are removed first, then the defaults, then all settings, then the configuration.
        """
        text = self.to_json()
        for smaller in self._smaller():
            if len(text.encode()) <= nbytes:
                break
            text = smaller.to_json()
        return text

    def _smaller(self) -> Iterator[Description]:
        if self.configuration is None:
            return
        settings = self.configuration.settings
        for fewer in (
            [replace(setting, note="") if setting.origin == "default" else setting for setting in settings],
            [setting for setting in settings if setting.origin != "default"],
            [],
        ):
            yield replace(self, configuration=replace(self.configuration, settings=fewer))
        yield replace(self, configuration=None)

    @classmethod
    def from_json(cls, text: str | bytes) -> Description:
        """Inverse of ``to_json``; unknown fields are dropped. Raises ValueError."""
        return _DESCRIPTION.validate_json(text)


_DESCRIPTION = TypeAdapter(Description)
