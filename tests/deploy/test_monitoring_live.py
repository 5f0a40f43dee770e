"""Prometheus scrapes the three real services under load: every expression has data, and every fault its alert.

One scenario, since it takes a minute to start and to break everything. The rules are the real ones with shorter times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.demo import smollm2
from deploy.grafana import build
from deploy.grafana.panels import VARIABLES
from tests.deploy.load import Load
from tests.deploy.prometheus import WINDOW, Prometheus, quick, require
from tests.deploy.test_monitoring_rules import RULES, rules
from tests.drafts import write_tiny_draft
from tests.end_to_end.services import Recorded, start_target
from tests.end_to_end.trio import start_draft
from tests.gateway.client import GREEDY, Client
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import ANY, eventually, scripted_draft

ROOT = Path(__file__).parents[2]
ALL = {"$model": ".*", "$draft": ".*", "$instance": ".*", "$__rate_interval": WINDOW}

# So hot that both random models follow the noise that they share, and the draft is nearly always right.
HOT = {"temperature": 50.0}
ASKS = {"max_new_tokens": 60, "ignore_eos": True}
WITH_DRAFT = {"k": 6, "sampling": HOT, **ASKS}
PLAIN = {"k": 0, "sampling": HOT, **ASKS}
SCRIPTED = {"k": 4, "sampling": GREEDY, "speculation": {"draft_model": "scripted-draft"}, **ASKS}
RIGHT = {**SCRIPTED, "request_id": "pattern=right"}
WRONG = {**SCRIPTED, "request_id": "pattern=wrong"}


LIMITS = ("--max-sequences", "6", "--kv-cache", "64MiB", "--max-sequence-length", "2000")
DEMO_TARGET = smollm2.cache_folder() / smollm2.DIRECTORY


@dataclass
class World:
    """The services, what loads them, and who watches."""

    target: Service
    draft: Service
    scripted: Service
    gateway: Service
    pairs: Path
    load: Load
    prometheus: Prometheus

    def fires(self, *names: str, seconds: float = 90) -> dict[str, list[dict[str, str]]]:
        """Waits until these alerts fire, and returns all that do."""
        eventually(lambda: set(names) <= self.prometheus.firing().keys(), seconds)
        return self.prometheus.firing()

    def fires_only(self, *names: str, seconds: float = 90) -> dict[str, list[dict[str, str]]]:
        """Waits until these alerts fire and no other."""
        found: dict[str, list[dict[str, str]]] = {}

        def so() -> bool:
            nonlocal found
            found = self.prometheus.firing()
            return set(names) == found.keys()

        try:
            eventually(so, seconds)
        except AssertionError:
            raise AssertionError(f"expected {names} and nothing else, found {found}") from None
        return found


@contextlib.contextmanager
def world(directory: Path, model: Path, draft_model: Path) -> Iterator[World]:
    """A target with a real draft and a scripted one, which only requests that name it get."""
    recorded = Recorded(directory / "oracle.json")
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(start_target(model, *LIMITS))
        draft = stack.enter_context(start_draft(draft_model, target.address))
        scripted = stack.enter_context(scripted_draft(target.address, "--oracle", str(recorded.path)))
        pairs = directory / "gateway.yaml"
        pairs.write_text(f'pair: ["{target.address}={draft.address},{scripted.address}:0%"]\n')
        gateway = stack.enter_context(Service("gateway", *ANY, "--config", str(pairs), "--recover-within", "1"))
        eventually(lambda: gateway.metric("outrider_peer_available") == 3)
        recorded.add([asyncio.run(record(gateway.address))])
        addresses = {
            f"outrider-{name}": service.metrics
            for name, service in {"target": target, "draft": draft, "other-draft": scripted, "gateway": gateway}.items()
        }
        load = Load(gateway.address)
        stack.callback(load.stop)
        prometheus = stack.enter_context(Prometheus(directory / "prometheus", quick(RULES.read_text()), addresses))
        prometheus.wait_ready()
        yield World(target, draft, scripted, gateway, pairs, load, prometheus)


async def record(address: str) -> Any:
    """What the target answers to the scripted draft's requests."""
    async with Client(address) as client:
        return await client.generate(k=0, sampling=GREEDY, **ASKS)


@pytest.mark.timeout(900)
def test_every_expression_has_data_and_every_fault_its_alert(tmp_path: Path) -> None:
    require("prometheus")
    model = write_tiny_llama(tmp_path / "target", num_hidden_layers=40)
    draft_model = write_tiny_draft(tmp_path / "draft", draft_vocab_size=320)
    with world(tmp_path, model, draft_model) as started:
        healthy = {"draft": (2, WITH_DRAFT), "plain": (1, PLAIN)}
        with started.load.running(**healthy):
            with started.load.running(scripted=(1, RIGHT)):
                check_expressions(started)
                started.fires_only()
            check_a_bad_draft(started)
            check_a_bad_file(started)
            check_a_slow_target(started)
            check_a_lost_draft(started)
        check_a_queue(started)
        with started.load.running(**healthy):
            check_a_lost_target(started)
        assert started.prometheus.fired == {rule["alert"] for rule in rules() if "alert" in rule}


@pytest.mark.skipif(not DEMO_TARGET.is_dir(), reason="the demo's target is not in the cache: make demo puts it there")
@pytest.mark.timeout(900)
def test_every_expression_has_data_on_the_demo_pair(tmp_path: Path) -> None:
    require("prometheus")
    with world(tmp_path, DEMO_TARGET, ROOT / "deploy" / "demo" / "draft") as started:
        loads = {"draft": (2, {**WITH_DRAFT, "sampling": GREEDY}), "plain": (1, {**PLAIN, "sampling": GREEDY})}
        with started.load.running(**loads, scripted=(1, RIGHT)):
            check_expressions(started)
            slower = {"OutriderSpeculationSlower"}  # two cores, four streams
            eventually(lambda: started.prometheus.firing().keys() <= slower)


def check_expressions(world: World) -> None:
    """All that the rules, the dashboards and the documents name has data, under a load that lacks nothing."""
    prometheus = world.prometheus
    wanted = {f"{panel}: {expression}": substituted(expression) for panel, expression in expressions()}
    wanted |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        wanted |= {
            f"{rule.get('alert')} {name}": name
            for name in re.findall(r"\b(?:outrider[_:][\w:]+|grpc_server_\w+|up\b)", rule["expr"])
        }
    wanted |= {name: f'{{__name__=~"{name}(_bucket)?"}}' for name in documented()}
    missing = wanted
    deadline = time.monotonic() + 90
    while missing and time.monotonic() < deadline:
        missing = {name: expression for name, expression in missing.items() if not prometheus.has(expression)}
        time.sleep(0.2)
    assert not missing, f"no data: {json.dumps(missing, indent=1)}"
    assert len(wanted) > 100
    for title, panel in panels():
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
            for target in panel["targets"]:
                check_shares(prometheus, title, substituted(target["expr"]))


def check_shares(prometheus: Prometheus, title: str, expression: str) -> None:
    """All values are between 0 and 1, or hardly above.

    A scrape is no instant: rounds may end between two of its counters, and the windows here are short.
    """
    values: list[float] = []

    def so() -> bool:
        nonlocal values
        values = [value for _, value in prometheus.query(expression) if value == value]
        return all(0 <= value <= 1.2 for value in values)

    try:
        eventually(so)
    except AssertionError:
        raise AssertionError(f"{title}: expected shares, found {values}") from None


def substituted(expression: str) -> str:
    """An expression as Grafana sends it when all is selected."""
    for variable, value in ALL.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of both dashboards that show something, by file and title."""
    for file in build.DASHBOARDS:
        for panel in json.loads((build.DIRECTORY / file).read_text())["panels"]:
            if panel["type"] != "row":
                yield f"{file}, {panel['title']}", panel


def expressions() -> Iterator[tuple[str, str]]:
    """Of the panels and of the variables."""
    for title, panel in panels():
        for target in panel["targets"]:
            yield title, target["expr"]
    for name, (_, definition) in VARIABLES.items():
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", definition).groups()
        yield f"variable {name}", f"count by ({label}) ({series})"


def documented() -> set[str]:
    """Series that the documents of monitoring name."""
    pages = [*(ROOT / "docs" / "runbooks").glob("*.md"), ROOT / "docs" / "monitoring.md"]
    return {name for page in pages for name in re.findall(r"\b(?:outrider[_:]|grpc_server_)[\w:]+\w", page.read_text())}


def check_a_bad_draft(world: World) -> None:
    """It is wrong at every place, the real draft beside it is not."""
    names = ("OutriderAcceptanceCollapsed", "OutriderAcceptanceZeroAtPosition1", "OutriderSpeculationSlower")
    with world.load.running(scripted=(2, WRONG)):
        firing = world.fires_only(*names)
    assert {labels["draft_model"] for alerts in firing.values() for labels in alerts} == {"scripted-draft"}
    world.fires_only()


def check_a_bad_file(world: World) -> None:
    """The gateway is told to read pairs that are none, and then right ones again."""
    right = world.pairs.read_text()
    for text, alerts in (("pair: [nowhere]\n", ("OutriderReloadRefused",)), (right, ())):
        world.pairs.write_text(text)
        world.gateway.hang_up()
        world.fires_only(*alerts)


def check_a_slow_target(world: World) -> None:
    """Its process hardly runs: it is stopped for 0.2 s again and again, after less time than a step takes."""
    deadline = time.monotonic() + 90
    try:
        while "OutriderVerifySlow" not in world.prometheus.firing():  # asked while it is stopped
            assert time.monotonic() < deadline, f"expected OutriderVerifySlow, found {world.prometheus.firing()}"
            for _ in range(3):
                world.target.resume()
                time.sleep(0.004)
                world.target.pause()
                time.sleep(0.2)
    finally:
        world.target.resume()
    world.fires_only()


def check_a_lost_draft(world: World) -> None:
    """It is gone, and then one for another target comes in its place."""
    with world.load.running(scripted=(2, RIGHT)):
        world.scripted.kill()
        firing = world.fires_only("OutriderDraftUnavailable", "OutriderServiceDown", "OutriderStepsWithoutChain")
    assert [labels["address"] for labels in firing["OutriderDraftUnavailable"]] == [world.scripted.address]
    assert [labels["instance"] for labels in firing["OutriderServiceDown"]] == [world.scripted.metrics]
    with Service(
        "tests.scripted.draft", "--listen", world.scripted.address, "--metrics-listen", world.scripted.metrics,
        "--target", world.target.address, "--fingerprint", "another",
    ):  # fmt: skip
        (misfit,) = world.fires_only("OutriderDraftMisfit")["OutriderDraftMisfit"]
        assert misfit["reason"] == "weights_fingerprint" and misfit["address"] == world.scripted.address


def check_a_queue(world: World) -> None:
    """More requests than the target takes at once, and ever more.

    On a slow machine the queue no longer grows when the first of those that had to wait are taken from it.
    """
    names, seen = {"OutriderQueueGrowing", "OutriderQueueSlow"}, set[str]()

    def both_seen() -> bool:
        seen.update(world.prometheus.firing())
        return names <= seen

    with world.load.arriving(200, every=0.1, k=0, sampling=HOT, max_new_tokens=500, ignore_eos=True):
        eventually(both_seen, 150)
    eventually(lambda: not names & world.prometheus.firing().keys())


def check_a_lost_target(world: World) -> None:
    """Nothing is left to answer."""
    world.target.kill()
    firing = world.fires("OutriderTargetDown", "OutriderServiceDown", "OutriderErrors")
    (down,) = firing["OutriderTargetDown"]
    assert down["address"] == world.target.address
