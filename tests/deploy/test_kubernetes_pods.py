"""What every pod of every overlay must be: restricted, deaf to injected variables, never two on one GPU."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.pairing import parse_pairs
from outrider.metrics import split_address
from tests.deploy.manifests import (
    WITH_PAIRS,
    build,
    containers,
    every_overlay,
    needs_kubectl,
    objects,
    pod_of,
    raw_containers,
    workloads,
)

pytestmark = needs_kubectl

# What Pod Security's profile `restricted` lets pods mount, of what is used here.
VOLUMES = {"persistentVolumeClaim", "configMap", "secret", "emptyDir"}


def pods(overlay: str) -> list[dict[str, Any]]:
    """The pods of an overlay, and the one that weights are copied through."""
    return [*map(pod_of, workloads(overlay)), *(found["spec"] for found in build("loader"))]


def has_gpu(pod: dict[str, Any], container: dict[str, Any]) -> bool:
    limits = container["resources"].get("limits", {})
    return bool(container["resources"].get("claims")) or "nvidia.com/gpu" in limits


@every_overlay
def test_pods_are_restricted(overlay):
    (namespace,) = objects(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(overlay):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
        assert all(VOLUMES & set(volume) for volume in pod["volumes"])
        for container in raw_containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            # NVIDIA's hook must write to the root before the container starts.
            assert security["readOnlyRootFilesystem"] is not has_gpu(pod, container)
            assert not {"privileged", "runAsUser", "seccompProfile"} & set(security)


@every_overlay
def test_pods_get_nothing_that_they_did_not_ask_for(overlay):
    for pod in pods(overlay):
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        accounts = {found["metadata"]["name"] for found in objects(overlay, "ServiceAccount")}
        assert pod["serviceAccountName"] in accounts


@every_overlay
def test_roots_are_read_only_but_caches_are_not(overlay):
    for pod in map(pod_of, workloads(overlay)):
        for container in raw_containers(pod):
            writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert {"/tmp", "/cache"} <= writable
            variables = {item["name"]: item["value"] for item in container["env"]}
            assert variables["XDG_CACHE_HOME"] == "/cache"
            assert all(mount.get("readOnly") for mount in container["volumeMounts"] if "weights" in mount["name"])


@pytest.mark.parametrize("overlay", WITH_PAIRS)
def test_the_target_starts_first_and_ends_last(overlay):
    (workload,) = objects(overlay, "StatefulSet")
    pod = pod_of(workload)
    (target,) = pod["initContainers"]
    assert target["name"] == "target" and target["restartPolicy"] == "Always"
    assert target["startupProbe"]["grpc"]["service"] == "outrider.v1.TargetService", "drafts start when it has loaded"
    assert {container["name"] for container in pod["containers"]} <= {"draft", "draft-canary"}
    assert pod["shareProcessNamespace"] is True
    assert all(
        "readinessProbe" in container for container in raw_containers(pod) if container["name"] != "draft-canary"
    )


@pytest.mark.parametrize("overlay", WITH_PAIRS)
def test_a_target_is_found_also_while_its_draft_is_not_ready(overlay):
    services = {found["metadata"]["name"]: found["spec"] for found in objects(overlay, "Service")}
    assert services["pair"]["publishNotReadyAddresses"] is True
    assert not services["gateway"].get("publishNotReadyAddresses")


@every_overlay
def test_every_service_is_headless(overlay):
    assert {found["spec"]["clusterIP"] for found in objects(overlay, "Service")} == {"None"}


@every_overlay
def test_no_pod_surges_where_a_gpu_is_scarce(overlay):
    """A StatefulSet replaces a pod after it has gone. Gateways have no GPU, and come before they go."""
    for workload in workloads(overlay):
        pod = pod_of(workload)
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
            assert workload["spec"]["podManagementPolicy"] == "Parallel"
        else:
            assert not any(has_gpu(pod, container) for container in raw_containers(pod))
            assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("overlay", ["gpt-oss-120b-h200", "many"])
def test_all_containers_of_a_pair_share_one_gpu(overlay):
    (template,) = objects(overlay, "ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert "count" not in request["exactly"], "one is the default"
    (workload,) = objects(overlay, "StatefulSet")
    pod = pod_of(workload)
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert all(container["resources"]["claims"] == [{"name": "gpu"}] for container in raw_containers(pod))


@pytest.mark.parametrize("overlay", ["many"])
def test_everything_is_encrypted_where_mutual_tls_is_on(overlay, tmp_path):
    for container in containers(overlay, tmp_path):
        settings = container.settings
        assert settings["insecure"] is False
        assert settings["ssl_certfile"] and settings["ssl_keyfile"] and settings["ssl_ca_certs"], container.name
        assert container.service == "target" or settings["peer_ca_certs"], container.name
    certificates = {found["metadata"]["name"]: found["spec"] for found in objects(overlay, "Certificate")}
    (gateway,) = [found.settings for found in containers(overlay, tmp_path) if found.service == "gateway"]
    pairs = parse_pairs(gateway["pair"])
    called = {split_address(pair.target)[0] for pair in pairs} | {"localhost"}
    assert called == set(certificates["pair"]["dnsNames"])
    assert {"localhost", "gateway", "gateway.outrider"} <= set(certificates["gateway"]["dnsNames"])
    issuers = {found["metadata"]["name"] for found in objects(overlay, "Issuer")}
    assert {certificate["issuerRef"]["name"] for certificate in certificates.values()} == issuers


def test_a_device_plugins_gpu_has_one_container():
    (workload,) = objects("single-container", "StatefulSet")
    (container,) = raw_containers(pod_of(workload))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "shareProcessNamespace" not in pod_of(workload)


@every_overlay
def test_threads_are_counted_where_the_processor_computes(overlay, tmp_path):
    """torch would take as many as the node has, whatever the container asks for."""
    for container in containers(overlay, tmp_path):
        if container.settings.get("device") == "cpu":
            cores = container.raw["resources"]["requests"]["cpu"]
            assert int(container.environment["OMP_NUM_THREADS"]) >= float(cores.removesuffix("m")) / (
                1000 if cores.endswith("m") else 1
            )
            assert "B" in container.settings["kv_cache"], "a fraction would be one of the node's memory"


@every_overlay
def test_what_is_not_opened_is_refused(overlay):
    (deny,) = [found["spec"] for found in objects(overlay, "NetworkPolicy") if not found["spec"]["podSelector"]]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in objects(overlay, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule.get("from") and rule.get("ports") for rule in policy["spec"].get("ingress", []))
        assert all(rule.get("to") and rule.get("ports") for rule in policy["spec"].get("egress", []))
        if policy["metadata"]["name"] in ("pair", "single"):
            assert not policy["spec"].get("egress"), "they call nobody"


@every_overlay
def test_draining_a_node_takes_one_pod_of_a_kind(overlay):
    assert all(found["spec"]["maxUnavailable"] == 1 for found in objects(overlay, "PodDisruptionBudget"))
