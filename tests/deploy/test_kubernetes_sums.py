"""Sums that must add up: seconds of drains, probes and answers; bytes of weights, caches and shared memory."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from outrider.cli.processes import ServiceProcess
from outrider.settings import parse_bytes
from tests.deploy.manifests import (
    WITH_PAIRS,
    Container,
    containers,
    every_overlay,
    needs_kubectl,
    objects,
    pod_of,
    quantity,
)
from tests.deploy.sizes import GIB, H200_BYTES, MIB, SIZES, Sizes

pytestmark = needs_kubectl

MARGIN = 10.0  # seconds beyond what a service promises to end within


@pytest.fixture
def services(overlay, tmp_path) -> list[Container]:
    return [container for container in containers(overlay, tmp_path) if container.service != "up"]


def only(services: list[Container], service: str) -> Container:
    (found,) = [container for container in services if container.service == service]
    return found


def drafts(services: list[Container]) -> list[Container]:
    return [container for container in services if container.service == "draft"]


def sizes_of(services: list[Container]) -> Sizes:
    return SIZES[only(services, "target").settings["name"]]


def pre_stop(container: Container) -> float:
    return float(container.raw.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))


def budget(probe: dict[str, Any]) -> float:
    """Seconds until a probe has failed too often."""
    return float(probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe["failureThreshold"])


def shared_memory(container: Container) -> dict[str, Any]:
    names = {mount["mountPath"]: mount["name"] for mount in container.raw["volumeMounts"]}
    (volume,) = [found for found in pod_of(container.workload)["volumes"] if found["name"] == names["/dev/shm"]]
    return volume["emptyDir"]


@every_overlay
def test_drains_end_within_the_grace_period(overlay, services):
    """preStop + drain + a margin: of all services of a pod, one after the other."""
    target, front = only(services, "target"), only(services, "gateway")
    pair = pod_of(target.workload)["terminationGracePeriodSeconds"]
    drains = max(draft.settings["grace"] for draft in drafts(services)) + target.settings["grace"]
    drain = front.settings["grace"]
    if front.raw is target.raw:  # outrider up
        assert pre_stop(front) + drain + drains + MARGIN <= pair
        by_force = inspect.signature(ServiceProcess.stop).parameters["grace"].default
        assert all(service.settings["grace"] < by_force for service in services)
    else:
        assert max(map(pre_stop, services)) == pre_stop(front)
        assert drains + MARGIN <= pair
        assert pre_stop(front) + drain + MARGIN <= pod_of(front.workload)["terminationGracePeriodSeconds"]


@every_overlay
def test_clients_have_time_to_look_elsewhere_before_a_gateway_drains(overlay, services):
    """Its readiness is off at once, and the records of its DNS name live for five seconds by default."""
    assert pre_stop(only(services, "gateway")) >= 10


@every_overlay
def test_no_answer_is_cut_by_the_age_of_its_connection(overlay, services):
    target, front = only(services, "target").settings, only(services, "gateway").settings
    longest = target["max_sequence_length"] / sizes_of(services).slowest_tokens_per_second
    assert front["max_connection_age"] > 0
    assert longest < front["connection_age_grace"]


@every_overlay
def test_a_target_may_take_three_times_as_long_to_load_as_it_does(overlay, services):
    target = only(services, "target")
    assert budget(target.raw["startupProbe"]) >= 3 * sizes_of(services).load_seconds
    for container in services:
        assert budget(container.raw["startupProbe"]) >= 60
        assert budget(container.raw["livenessProbe"]) >= 30, "a busy process is no dead one"
        assert container.raw["livenessProbe"]["timeoutSeconds"] >= 5


@pytest.mark.parametrize("overlay", WITH_PAIRS)
def test_gateways_wait_for_a_target_that_loads_again_where_there_is_no_other(overlay, services):
    front = only(services, "gateway").settings
    if len(front["pair"]) == 1:
        assert front["recover_within"] >= 2 * sizes_of(services).load_seconds + 30
    for scaled in objects(overlay, "ScaledObject"):
        assert scaled["spec"]["minReplicaCount"] >= 2, "the last pair's requests have nowhere to go"


@every_overlay
def test_shared_memory_holds_every_draft_and_one_that_attaches_anew(overlay, services):
    target = only(services, "target")
    volume = shared_memory(target)
    assert volume["medium"] == "Memory"
    wanted = parse_bytes(target.settings["shared_memory"]) * (len(drafts(services)) + 1)
    assert wanted <= quantity(volume["sizeLimit"])
    assert all(shared_memory(draft) is volume for draft in drafts(services))


def host_bytes(container: Container, sizes: Sizes) -> float:
    """What a container of these settings holds in the host's memory."""
    settings = container.settings
    if container.service == "gateway":
        return 128 * MIB  # measured, with 16 requests
    if container.service == "target":
        shm = quantity(shared_memory(container)["sizeLimit"])
        if settings["device"] == "cuda":
            return 2 * sizes.largest_tensor + shm + sizes.runtime
        return sizes.weights + parse_bytes(settings["kv_cache"]) + shm + sizes.runtime
    weights = sizes.draft_weights  # new ones are loaded beside the old ones
    if settings["device"] == "cuda":
        return weights + sizes.draft_runtime
    return 2 * (weights + parse_bytes(settings["kv_cache"])) + sizes.draft_runtime


@every_overlay
def test_memory_limits_follow_from_the_models_sizes(overlay, services):
    by_container: dict[str, list[Container]] = {}
    for container in services:
        by_container.setdefault(container.name, []).append(container)
    for name, inside in by_container.items():
        needed = sum(host_bytes(container, sizes_of(services)) for container in inside)
        limit = inside[0].memory_limit
        assert needed <= limit, f"{name} needs {needed / MIB:.0f} MiB"
        assert limit <= max(1.5 * needed, 1 * GIB), f"{name} needs only {needed / MIB:.0f} MiB"


@pytest.mark.parametrize("overlay", ["gpt-oss-120b-h200", "single-container", "many"])
def test_all_models_and_caches_fit_the_gpu(overlay, services):
    target, sizes = only(services, "target").settings, sizes_of(services)
    cache = parse_bytes(target["kv_cache"])
    draft_bytes = sum(2 * (sizes.draft_weights + parse_bytes(d.settings["kv_cache"])) for d in drafts(services))
    contexts = 5 * GIB
    assert sizes.weights + cache + draft_bytes + contexts <= H200_BYTES
    longest = target["max_sequence_length"] + target["max_draft_tokens"]
    assert longest * sizes.kv_bytes_per_token <= cache, "one sequence of the longest must fit"


def test_the_demo_fits_a_node_of_two_processors_and_four_gibibytes(tmp_path):
    services = list(containers("cpu-demo", tmp_path))
    assert sum(container.memory_limit for container in services) <= 3.5 * GIB
    cores = [container.raw["resources"]["requests"]["cpu"] for container in services]
    assert sum(float(core.removesuffix("m")) / (1000 if core.endswith("m") else 1) for core in cores) <= 1.75
    target = only(services, "target")
    sizes = SIZES["smollm2-135m"]
    assert target.settings["max_sequence_length"] * sizes.kv_bytes_per_token <= parse_bytes(target.settings["kv_cache"])


@every_overlay
def test_memory_is_asked_for_as_it_is_limited(overlay, services):
    """A container that may use more than it asked for is the first to be killed; a limit of processors only delays."""
    for container in services:
        resources = container.raw["resources"]
        assert quantity(resources["requests"]["memory"]) == container.memory_limit
        assert "cpu" in resources["requests"] and "cpu" not in resources["limits"]


def test_sizes_are_those_of_the_published_models():
    assert SIZES["smollm2-135m"].weights == pytest.approx(134.5e6 * 2, rel=1e-3)
    assert SIZES["gpt-oss-120b"].weights == pytest.approx(65.3e9, rel=1e-2)
    assert SIZES["gpt-oss-120b"].kv_bytes_per_token == 73728
