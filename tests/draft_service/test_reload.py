"""SIGHUP at a draft process: new weights take over, those that do not fit change nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import grpc
import pytest
import torch
from prometheus_client import Gauge

from draft_service.reload import Reload
from draft_service.self_test import Verdict
from outrider.v1 import draft_pb2, target_pb2
from tests.draft_service.client import DraftClient, extend_draft, open_draft
from tests.draft_service.drivers import extend, load_proposer, new_sequence
from tests.drafts import point, write_tiny_draft
from tests.end_to_end.services import start_target
from tests.end_to_end.trio import start_draft
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import eventually


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """A link to the first of two drafts, `one` and `two`, of other weights."""
    folder = tmp_path_factory.mktemp("drafts")
    for seed, name in enumerate(("one", "two")):
        write_tiny_draft(folder / name, seed=seed, embed=True)
    point(folder / "current", folder / "one")
    return folder / "current"


@pytest.fixture(scope="module")
def served(link):
    with (
        start_target(write_tiny_llama(link.parent / "target", num_hidden_layers=4)) as target,
        start_draft(link, target.address) as service,
    ):
        yield service
        assert service.stop() == 0


STATES = torch.randn(4, 3 * 64, generator=torch.Generator().manual_seed(1))
TOKENS = [5, 6, 7, 8]


async def proposed(service: Service) -> tuple[draft_pb2.GetDraftInfoResponse, list[int]]:
    """What the draft says that it is, and what it proposes after some rows."""
    client = DraftClient(service.address)
    try:
        await client.send(open_draft(1))
        proposal = await client.propose(extend_draft(1, 0, STATES, TOKENS, 6))
        return await client.info(), list(proposal.token_ids)
    finally:
        await client.close()


def expected(directory: Path) -> list[int]:
    """What that draft would propose in a process of its own."""
    return extend(load_proposer(directory), new_sequence(), 0, STATES, TOKENS, 6).token_ids


async def test_new_weights_take_over(served: Service, link: Path) -> None:
    one, two = (expected(link.parent / name) for name in ("one", "two"))
    assert one != two
    before, tokens = await proposed(served)
    assert before.model == "one" and tokens == one
    client = DraftClient(served.address)  # a gateway that does not look at health
    await client.send(open_draft(1))
    point(link, link.parent / "two")
    served.hang_up()
    with pytest.raises(grpc.aio.AioRpcError, match="takes up new weights") as ended:
        await client.event()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    await client.close()
    await asyncio.to_thread(eventually, lambda: served.metric("outrider_draft_attached", draft_model="two") == 1)
    after, tokens = await proposed(served)
    assert after.model == "two" and after.instance_id != before.instance_id and tokens == two
    assert {labels["draft_model"] for _, labels, _ in served.scrape() if "draft_model" in labels} == {"two"}
    assert served.metric("outrider_last_reload_successful") == 1


async def test_what_does_not_fit_is_refused(served: Service, link: Path) -> None:
    before, tokens = await proposed(served)
    bad = link.parent / "bad"
    cases = {
        "wide": {"target_hidden_size": 128},
        "other_vocabulary": {"vocab_size": 321, "draft_vocab_size": 96},
        "high": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}},
    }
    for name, settings in cases.items():
        write_tiny_draft(bad / name, **settings)
    write_tiny_draft(bad / "damaged")
    (bad / "damaged" / "model.safetensors").write_bytes(b"nothing")
    for name in (*cases, "damaged", "absent"):
        point(link, bad / name)
        served.hang_up()
        await asyncio.to_thread(
            eventually, lambda name=name: f"SIGHUP: {bad / name}" in served.text.replace("SIGHUP: loading", "")
        )
        await asyncio.to_thread(eventually, lambda: served.metric("outrider_last_reload_successful") == 0)
    assert served.text.count("the old weights go on serving") == len(cases) + 2
    info, again = await proposed(served)
    assert (info, again) == (before, tokens)
    point(link, link.parent / "one")
    served.hang_up()
    await asyncio.to_thread(eventually, lambda: served.metric("outrider_last_reload_successful") == 1)
    await asyncio.to_thread(eventually, lambda: served.metric("outrider_draft_attached", draft_model="one") == 1)


async def test_files_may_be_overwritten_while_they_serve(served: Service, link: Path) -> None:
    _, tokens = await proposed(served)
    file = link.resolve() / "model.safetensors"
    with file.open("r+b") as stream:  # the same inode, as cp does
        data = stream.read()
        stream.seek(0)
        stream.write(bytes(len(data)))
    assert (await proposed(served))[1] == tokens
    with file.open("r+b") as stream:
        stream.write(data)


@pytest.mark.parametrize(
    ("targets", "verdicts", "successful"),
    [
        (["a", "b"], [None, False], 0),  # lost while it wrote, and its successor shows that the weights are bad
        (["a", "b", "c"], [None, None, True], 1),
        (["a", "a"], [None], 1),  # too busy to write
    ],
)
async def test_a_target_lost_in_the_trial_is_no_reason_to_serve_untried_weights(targets, verdicts, successful) -> None:
    link, loader, gauge = MagicMock(), MagicMock(), Gauge("last_reload_successful", "", registry=None)
    link.info = AsyncMock(side_effect=[target_pb2.GetTargetInfoResponse(instance_id=name) for name in targets])
    loader.inspect, loader.load = AsyncMock(), AsyncMock()
    judge = AsyncMock(side_effect=[Verdict(fits, "tried") for fits in verdicts])
    gauge.set(-1)
    reload = Reload(loader, link, judge, gauge)
    running = asyncio.create_task(reload.run())
    reload.hang_up()
    await asyncio.to_thread(eventually, lambda: gauge._value.get() >= 0)
    running.cancel()
    assert gauge._value.get() == successful and judge.await_count == len(verdicts)
    candidate = reload.take()
    assert (candidate is not None) == bool(successful)
    assert candidate is None or candidate.verdict.fits == verdicts[-1]


async def test_a_second_signal_waits_until_the_weights_of_the_first_are_put_to_work() -> None:
    link, loader = MagicMock(info=AsyncMock()), MagicMock(inspect=AsyncMock(), load=AsyncMock())
    reload = Reload(loader, link, AsyncMock(return_value=None), Gauge("last_reload_successful", "", registry=None))
    running = asyncio.create_task(reload.run())
    reload.hang_up()
    await reload.accepted.wait()
    reload.hang_up()
    await asyncio.sleep(0.05)
    assert loader.load.await_count == 1
    assert reload.take() is not None
    await reload.accepted.wait()
    running.cancel()
    assert loader.load.await_count == 2
