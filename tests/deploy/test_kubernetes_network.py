"""Services, budgets, policies and monitors select pods that exist, and lead to ports that these have."""

from __future__ import annotations

from typing import Any

from tests.deploy.manifests import (
    every_overlay,
    labels_of,
    needs_kubectl,
    objects,
    pod_of,
    raw_containers,
    selects,
    workloads,
)

pytestmark = needs_kubectl


def ports_by_name(overlay: str, selector: dict[str, Any]) -> set[str]:
    return {
        port["name"]
        for workload in workloads(overlay)
        if selects(selector, labels_of(workload))
        for raw in raw_containers(pod_of(workload))
        for port in raw["ports"]
    }


@every_overlay
def test_selectors_select_one_workload_each(overlay):
    selectors = [
        *(service["spec"]["selector"] for service in objects(overlay, "Service")),
        *(budget["spec"]["selector"] for budget in objects(overlay, "PodDisruptionBudget")),
        *(
            policy["spec"]["podSelector"]
            for policy in objects(overlay, "NetworkPolicy")
            if policy["spec"]["podSelector"]
        ),
        *(workload["spec"]["selector"] for workload in workloads(overlay)),
        *(monitor["spec"]["selector"] for monitor in objects(overlay, "PodMonitor")),
    ]
    assert len(selectors) >= 4
    for selector in selectors:
        assert sum(selects(selector, labels_of(workload)) for workload in workloads(overlay)) == 1, selector
    for monitor in objects(overlay, "ServiceMonitor"):
        monitored = [
            service
            for service in objects(overlay, "Service")
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
        ]
        assert len(monitored) == 1


@every_overlay
def test_policies_let_in_and_out_to_pods_that_exist(overlay):
    for policy in objects(overlay, "NetworkPolicy"):
        rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
        for peer in [peer for rule in rules for peer in rule.get("from", rule.get("to"))]:
            if peer.get("podSelector") and "namespaceSelector" not in peer:
                assert sum(selects(peer["podSelector"], labels_of(workload)) for workload in workloads(overlay)) == 1


@every_overlay
def test_every_workload_has_a_budget_a_policy_and_a_service(overlay):
    for workload in workloads(overlay):
        for kind in ("PodDisruptionBudget", "NetworkPolicy", "Service"):
            part = {"NetworkPolicy": "podSelector"}.get(kind, "selector")
            found = [found["spec"][part] for found in objects(overlay, kind) if found["spec"][part]]
            assert sum(selects(selector, labels_of(workload)) for selector in found) == 1, kind


@every_overlay
def test_services_and_policies_lead_to_ports_that_exist(overlay):
    for service in objects(overlay, "Service"):
        names = ports_by_name(overlay, service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        numbers = {
            port["name"]: port["containerPort"]
            for workload in workloads(overlay)
            for raw in raw_containers(pod_of(workload))
            for port in raw["ports"]
        }
        assert all(port["port"] == numbers[port["targetPort"]] for port in service["spec"]["ports"]), "headless"
    for policy in objects(overlay, "NetworkPolicy"):
        spec = policy["spec"]
        for rule in spec.get("ingress", []):
            assert {port["port"] for port in rule["ports"]} <= ports_by_name(overlay, spec["podSelector"])
        for rule in spec.get("egress", []):
            for peer in rule["to"]:
                named = {port["port"] for port in rule["ports"] if isinstance(port["port"], str)}
                assert not named or named <= ports_by_name(overlay, peer["podSelector"])


@every_overlay
def test_policies_open_every_port_but_those_of_probes(overlay, tmp_path):
    """Kubelet's probes come from the node and pass in any case."""
    opened: dict[str, set[str]] = {}
    for policy in objects(overlay, "NetworkPolicy"):
        for workload in workloads(overlay):
            if policy["spec"]["podSelector"] and selects(policy["spec"]["podSelector"], labels_of(workload)):
                rules = policy["spec"]["ingress"]
                opened[workload["metadata"]["name"]] = {port["port"] for rule in rules for port in rule["ports"]}
    for workload in workloads(overlay):
        names = {port["name"] for raw in raw_containers(pod_of(workload)) for port in raw["ports"]}
        assert {name for name in names if "health" not in name} == opened[workload["metadata"]["name"]]


@every_overlay
def test_monitors_scrape_ports_that_exist(overlay):
    for monitor in objects(overlay, "PodMonitor"):
        ports = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
        assert set(ports) == {p for p in ports_by_name(overlay, monitor["spec"]["selector"]) if "metrics" in p}
    for monitor in objects(overlay, "ServiceMonitor"):
        (service,) = [found for found in objects(overlay, "Service") if found["metadata"]["name"] == "gateway"]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
