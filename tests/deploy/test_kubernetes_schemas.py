"""Every object is what Kubernetes, or the operator that it is meant for, takes; no field is unknown."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.deploy.manifests import KUBERNETES, OVERLAYS, build, needs_kubectl

pytestmark = needs_kubectl

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ["1.34", kubernetes_validate.latest_version()]
BUILT = [f"overlays/{overlay}" for overlay in OVERLAYS] + ["loader"]


@pytest.fixture(autouse=True, scope="module")
def _cached_schemas():
    """Each schema is read once, not once for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


def is_custom(found: dict[str, Any]) -> bool:
    """Whether an operator brings the kind: its API group is none of Kubernetes' own."""
    group, slash, _ = found["apiVersion"].partition("/")
    return bool(slash) and "." in group and not group.endswith(".k8s.io")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("directory", BUILT)
def test_kubernetes_takes_every_object(directory, version):
    for found in build(directory):
        if not is_custom(found):
            kubernetes_validate.validate(found, version, strict=True)
            assert not re.search("alpha|beta", found["apiVersion"]), "clusters serve these only when they are told to"


@pytest.mark.parametrize("directory", BUILT)
def test_operators_take_every_custom_resource(directory):
    for found in filter(is_custom, build(directory)):
        schema = yaml.safe_load((SCHEMAS / f"{found['kind'].lower()}.yaml").read_text())
        jsonschema.validate(found, schema, cls=jsonschema.Draft202012Validator)


def test_the_newest_schemas_are_newer_than_the_oldest_version_that_is_promised():
    assert VERSIONS[0] != VERSIONS[1]


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.yaml")), ids=lambda path: path.stem)
def test_schemas_are_schemas_that_refuse_unknown_fields(path):
    schema = yaml.safe_load(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)

    def closed(part: Any) -> bool:
        if isinstance(part, list):
            return all(map(closed, part))
        if not isinstance(part, dict):
            return True
        own = "properties" not in part or part.get("additionalProperties") is False
        return own and all(map(closed, part.values()))

    assert closed(schema)


@pytest.mark.parametrize("directory", BUILT)
def test_every_object_lies_in_one_namespace(directory):
    namespaces = {found["metadata"].get("namespace") for found in build(directory) if found["kind"] != "Namespace"}
    assert namespaces == {"outrider"}


def test_the_rules_are_those_of_prometheus():
    check = [sys.executable, str(KUBERNETES.parents[1] / "tools" / "kubernetes_rules.py"), "--check"]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("component", sorted(path.name for path in (KUBERNETES / "components").iterdir()))
def test_every_component_does_on_its_own(component, tmp_path):
    """On the demo, too: one that took another for granted would leave half a container behind."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "outrider",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "cpu-demo", tmp_path)],
        "components": [os.path.relpath(KUBERNETES / "components" / component, tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    plain = {(found["kind"], found["metadata"]["name"]) for found in build("overlays/cpu-demo")}
    built = build(str(tmp_path))
    assert plain <= {(found["kind"], found["metadata"]["name"]) for found in built}
    for found in built:
        if not is_custom(found):
            kubernetes_validate.validate(found, VERSIONS[0], strict=True)
        if found["kind"] in ("StatefulSet", "Deployment"):
            pod = found["spec"]["template"]["spec"]
            assert all("image" in raw for raw in [*pod.get("initContainers", []), *pod["containers"]])


def test_every_file_is_used():
    """A file that no kustomization names would be forgotten in silence."""
    for path in KUBERNETES.rglob("*"):
        if path.is_file() and path.name != "kustomization.yaml":
            assert path.name in (path.parent / "kustomization.yaml").read_text(), path
