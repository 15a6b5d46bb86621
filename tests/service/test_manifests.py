"""The manifests in examples/sidecar/kubernetes have only fields that the APIs have, with their types.

The objects of Kubernetes are checked against the JSON schemas of its API. For custom resources, the test has the schema
of the fields that the manifests may use, after the API reference of each project.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

DIRECTORY = Path(__file__).parents[2] / "examples" / "sidecar" / "kubernetes"
MANIFESTS = {file.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in DIRECTORY.glob("*.yaml")}
VERSIONS = ("1.30", "1.37")  # the oldest that docs/tools/sidecar.md names, and a new one

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
MANY = {"type": "integer", "minimum": 0}
SECRET_KEY = {"name": TEXT, "key": TEXT}


def fields(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": [*required],
        "additionalProperties": False,
    }


def list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = fields({"name": TEXT}, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    return fields(
        {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


RELABELING = fields(
    {},
    sourceLabels=list_of(TEXT),
    separator={"type": "string"},
    targetLabel=TEXT,
    regex=TEXT,
    modulus=MANY,
    replacement={"type": "string"},
    action={"enum": ["replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep"]},
)
# monitoring.coreos.com/v1, https://prometheus-operator.dev/docs/api-reference/api/
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        {
            "selector": fields({"matchLabels": TEXTS}),
            "podMetricsEndpoints": list_of(
                fields(
                    {"port": TEXT},
                    path=TEXT,
                    scheme={"enum": ["http", "https"]},
                    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                    scrapeTimeout={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                    honorLabels={"type": "boolean"},
                    authorization=fields({"credentials": fields(SECRET_KEY)}, type=TEXT),
                    relabelings=list_of(RELABELING),
                    metricRelabelings=list_of(RELABELING),
                )
            ),
        },
        jobLabel=TEXT,
        podTargetLabels=list_of(TEXT),
        namespaceSelector=fields({}, any={"type": "boolean"}, matchNames=list_of(TEXT)),
    ),
)
# jobset.x-k8s.io/v1alpha2, https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/; `template` is that of a Job.
JOB_SET = resource(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    fields(
        {
            "replicatedJobs": list_of(
                fields({"name": TEXT, "template": fields({"spec": {}}, metadata={})}, replicas=MANY)
            )
        },
        network=fields(
            {},
            enableDNSHostnames={"type": "boolean"},
            subdomain=TEXT,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=fields({"operator": {"enum": ["All", "Any"]}}, targetReplicatedJobs=list_of(TEXT)),
        failurePolicy=fields({}, maxRestarts=MANY),
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=MANY,
    ),
)
# kustomize.config.k8s.io/v1beta1, https://kubectl.docs.kubernetes.io/references/kustomize/kustomization/
KUSTOMIZATION = fields(
    {
        "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
        "kind": {"const": "Kustomization"},
        "resources": list_of(TEXT),
    },
    namespace=TEXT,
    images=list_of(fields({"name": TEXT}, newName=TEXT, newTag=TEXT, digest=TEXT)),
)
CUSTOM = {"PodMonitor": POD_MONITOR, "JobSet": JOB_SET, "Kustomization": KUSTOMIZATION}


def check(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError for an unknown field, a missing one, or a value of the wrong type."""
    if manifest["kind"] not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.Draft202012Validator(CUSTOM[manifest["kind"]]).validate(manifest)
    if manifest["kind"] == "JobSet":
        for job in manifest["spec"]["replicatedJobs"]:
            check({"apiVersion": "batch/v1", "kind": "Job"} | job["template"])


def is_accepted(manifest: dict[str, Any]) -> bool:
    try:
        check(manifest)
    except jsonschema.ValidationError:
        return False
    return True


def fields_of(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each field in a manifest: its path, the object that has it, and its name. Names in maps of labels are free."""
    if isinstance(node, list):
        for place, item in enumerate(node):
            yield from fields_of(item, f"{path}[{place}]")
    elif isinstance(node, dict):
        for name, value in node.items():
            yield f"{path}.{name}", node, name
            if name not in ("labels", "matchLabels", "limits", "requests"):
                yield from fields_of(value, f"{path}.{name}")


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_the_manifests_have_fields_of_the_apis(name: str) -> None:
    check(MANIFESTS[name])


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_a_field_that_is_misspelled_is_found(name: str) -> None:
    """Each field of each manifest, one after the other."""
    manifest = copy.deepcopy(MANIFESTS[name])
    accepted = []
    found = list(fields_of(manifest))
    assert len(found) > 5
    for path, owner, field in found:
        if path in (".kind", ".apiVersion"):
            continue
        before = dict(owner)
        owner[f"{field}x"] = owner.pop(field)
        if is_accepted(manifest):
            accepted.append(path)
        owner.clear()
        owner.update(before)
    assert accepted == []
