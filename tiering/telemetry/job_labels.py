"""Labels of a run: the job and the pod that it belongs to, and those of the configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tiering.telemetry.status_file import as_text

LABEL_NAME = re.compile("[a-zA-Z][a-zA-Z0-9_]{0,63}")
LONGEST_VALUE = 128  # characters
RESERVED_LABELS = frozenset(
    {"run", "user", "name", "world_size", "version", "torch_version", "python_version"}
)
"""The other labels of the metric tiering_run_info."""

# The downward API has no names of its own for variables: these are the usual ones.
_VARIABLES = {
    "job_id": "SLURM_JOB_ID",
    "job_name": "SLURM_JOB_NAME",
    "namespace": "POD_NAMESPACE",
    "pod": "POD_NAME",
}
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def job_labels(
    configured: Mapping[str, str], environ: Mapping[str, str] = os.environ, namespace: Path = _NAMESPACE
) -> dict[str, str]:
    """The labels of this process: its Slurm job, its pod in Kubernetes, and ``configured``, which takes precedence."""
    found = {label: environ.get(variable, "") for label, variable in _VARIABLES.items()}
    if "KUBERNETES_SERVICE_HOST" in environ:
        # Without the downward API.
        found["pod"] = found["pod"] or environ.get("HOSTNAME", "")
        found["namespace"] = found["namespace"] or _content(namespace)
    labels = {label: value for label, value in found.items() if value} | dict(configured)
    return {label: as_text(value)[:LONGEST_VALUE] for label, value in labels.items()}


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
