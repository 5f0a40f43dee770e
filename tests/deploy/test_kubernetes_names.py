"""What the manifests name exists: flags, variables, ports, health services, labels, images, series."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

import gateway.__main__
import target_service.__main__
from draft_service.server import DRAFT_SERVICE
from gateway.metrics import GatewayMetrics
from gateway.pairing import parse_pairs
from outrider import __version__
from outrider.metrics import split_address
from outrider.server import LIVENESS
from outrider.v1 import draft_pb2, gateway_pb2, target_pb2
from tests.deploy.manifests import (
    KUBERNETES,
    SERVICES,
    WITH_PAIRS,
    build,
    command_of,
    containers,
    every_overlay,
    needs_kubectl,
    objects,
    pod_of,
    quantity,
    raw_containers,
    read_settings,
    workloads,
)

pytestmark = needs_kubectl

HEALTH_SERVICES = {
    "target": target_service.__main__.SERVICE,
    "draft": DRAFT_SERVICE,
    "gateway": gateway.__main__.SERVICE,
}
# Command and service: `outrider up` is probed by way of its gateway.
PROBED = {*((service, service) for service in HEALTH_SERVICES), ("up", "gateway")}
LISTENS = ("listen", "metrics_listen", "health_listen")


def listened(settings: dict[str, Any]) -> set[int]:
    """The ports that a service's settings say, but for those of this machine alone."""
    addresses = [split_address(settings[name]) for name in LISTENS if settings.get(name)]
    return {port for host, port in addresses if host != "127.0.0.1"}


def test_health_services_are_those_of_the_contract():
    descriptors = [module.DESCRIPTOR for module in (target_pb2, draft_pb2, gateway_pb2)]
    names = {service.full_name for file in descriptors for service in file.services_by_name.values()}
    assert set(HEALTH_SERVICES.values()) <= names
    assert health_pb2.HealthCheckResponse.SERVING


@every_overlay
def test_the_services_take_every_flag_and_every_variable(overlay, tmp_path):
    known = {
        f"OUTRIDER_{service.upper()}_{parameter.name.upper()}"
        for service in SERVICES
        for parameter in command_of(service).params
    }
    for container in containers(overlay, tmp_path):  # which reads all flags, and the values of variables
        named = {name for name in container.environment if name.startswith("OUTRIDER_")}
        assert named <= known, container.name
        assert len(container.raw["env"]) == len(container.environment), "a variable twice"


def test_a_flag_that_is_not_there_would_be_seen(tmp_path):
    raw: dict[str, Any] = {"env": [{"name": "OUTRIDER_TARGET_MAX_SEQUENCES", "value": "many"}]}
    with pytest.raises(Exception, match="valid integer"):
        read_settings("target", raw, ["--model", "/"])
    with pytest.raises(Exception, match="sharks"):
        read_settings("target", {}, ["--model", "/", "--sharks", "3"])


@every_overlay
def test_ports_are_those_that_the_services_listen_on(overlay, tmp_path):
    wanted: dict[str, set[int]] = {}
    declared: dict[str, set[int]] = {}
    for container in containers(overlay, tmp_path):
        wanted.setdefault(container.name, set()).update(listened(container.settings))
        declared[container.name] = {port["containerPort"] for port in container.raw["ports"]}
    assert declared == wanted


@every_overlay
def test_port_names_are_unique_in_a_pod(overlay):
    for workload in workloads(overlay):
        ports = [port for raw in raw_containers(pod_of(workload)) for port in raw["ports"]]
        assert len({port["name"] for port in ports}) == len({port["containerPort"] for port in ports}) == len(ports)


@every_overlay
def test_probes_ask_for_health_under_names_that_the_service_answers(overlay, tmp_path):
    for container in containers(overlay, tmp_path):
        if (container.raw["command"][1], container.service) not in PROBED:
            continue
        service = HEALTH_SERVICES[container.service]
        listen = container.settings.get("health_listen") or container.settings["listen"]
        probes = {kind: container.raw.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        for probe in filter(None, probes.values()):
            assert probe["grpc"]["port"] == split_address(listen)[1]
        assert probes["liveness"]["grpc"]["service"] == LIVENESS, "a restart mends nothing but a process that hangs"
        assert probes["startup"]["grpc"]["service"] in (service, LIVENESS)
        if probes["readiness"]:
            assert probes["readiness"]["grpc"]["service"] == service


@pytest.mark.parametrize("overlay", WITH_PAIRS)
def test_gateways_know_every_pair_that_there_may_be(overlay, tmp_path):
    (gateway_settings,) = [found.settings for found in containers(overlay, tmp_path) if found.service == "gateway"]
    pairs = parse_pairs(gateway_settings["pair"])
    (workload,) = [found for found in objects(overlay, "StatefulSet") if found["metadata"]["name"] == "pair"]
    scaled = [found["spec"]["maxReplicaCount"] for found in objects(overlay, "ScaledObject")]
    replicas = scaled[0] if scaled else workload["spec"]["replicas"]
    assert [pair.target for pair in pairs] == [f"pair-{index}.pair:7101" for index in range(replicas)]
    beside = [raw["name"] for raw in pod_of(workload)["containers"]]
    ports = {"draft": 7102, "draft-canary": 7103}
    for index, pair in enumerate(pairs):
        shares = {draft.address: draft.percent for draft in pair.drafts}
        assert set(shares) == {f"pair-{index}.pair:{ports[name]}" for name in beside}
        assert shares[f"pair-{index}.pair:7102"] == 100, "a canary is idle until somebody raises its share"


@pytest.mark.parametrize("overlay", WITH_PAIRS)
def test_drafts_reach_the_target_of_their_pod(overlay, tmp_path):
    found = list(containers(overlay, tmp_path))
    (target,) = [container for container in found if container.service == "target"]
    for draft in (container for container in found if container.service == "draft"):
        host, port = split_address(draft.settings["target"])
        assert (host, port) == ("localhost", split_address(target.settings["listen"])[1])


@every_overlay
def test_every_container_has_the_image_of_this_version(overlay):
    """Which version an overlay asks for is said in one place, and is that of this checkout."""
    images = {raw["image"] for workload in workloads(overlay) for raw in raw_containers(pod_of(workload))}
    (image,) = images
    assert re.fullmatch(rf"registry\.example\.com/outrider:{re.escape(__version__)}-(cpu|cuda)", image)
    (loader,) = [found for found in build("loader") if found["kind"] == "Pod"]
    assert loader["spec"]["containers"][0]["image"].split(":")[0] == image.split(":")[0]


@every_overlay
def test_volumes_exist_and_are_used(overlay):
    claims = {found["metadata"]["name"]: found for found in objects(overlay, "PersistentVolumeClaim")}
    maps = {found["metadata"]["name"] for found in objects(overlay, "ConfigMap")}
    secrets = {found["spec"]["secretName"] for found in objects(overlay, "Certificate")}
    for workload in workloads(overlay):
        pod = pod_of(workload)
        mounted = {mount["name"] for raw in raw_containers(pod) for mount in raw["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            elif "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            else:
                assert quantity(volume["emptyDir"]["sizeLimit"]) > 0


@every_overlay
def test_scaling_asks_for_a_series_that_gateways_export(overlay):
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    series = {name for metric in registry.collect() for name in (metric.name, f"{metric.name}_total")}
    for scaled in objects(overlay, "ScaledObject"):
        (trigger,) = scaled["spec"]["triggers"]
        named = re.findall(r"outrider_\w+", trigger["metadata"]["query"])
        assert named and set(named) <= series
        labels = dict(re.findall(r'(\w+)="([^"]*)"', trigger["metadata"]["query"]))
        assert labels == {"namespace": scaled["metadata"]["namespace"], "service": "gateway"}
        target = scaled["spec"]["scaleTargetRef"]
        (workload,) = [found for found in workloads(overlay) if found["metadata"]["name"] == target["name"]]
        assert (workload["kind"], workload["apiVersion"]) == (target["kind"], target["apiVersion"])
        assert "replicas" not in workload["spec"], "kubectl apply would undo what KEDA did"


def test_kustomizations_name_what_exists():
    """kubectl says so for what an overlay uses; this is for components that none uses."""
    for path in KUBERNETES.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        for name in [*kustomization.get("resources", []), *kustomization.get("components", [])]:
            assert (path.parent / name).exists(), (path, name)


def test_every_component_is_part_of_an_overlay():
    used = {
        Path(name).name
        for path in KUBERNETES.glob("overlays/*/kustomization.yaml")
        for name in yaml.safe_load(path.read_text()).get("components", [])
    }
    assert used == {path.name for path in (KUBERNETES / "components").iterdir()}
