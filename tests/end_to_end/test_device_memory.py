"""Target and draft that share a device's memory, as processes; the device is tests/fake_cuda.py's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.shared_buffers import CUDA_IPC, INLINE, SHARED_MEMORY
from outrider.v1 import common_pb2, draft_pb2
from tests.draft_service.client import DraftClient
from tests.drafts import write_tiny_draft
from tests.end_to_end.services import check_drafted
from tests.end_to_end.trio import HOT, Trio
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import ANY, eventually, start_gateway

CASES = [
    {"prompt": list(range(1 + i, 40 + i)), "sampling": {**HOT, "seed": i}, "max_new_tokens": 24, "ignore_eos": True}
    for i in range(3)
]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the device's memory lies, for all processes that are started from here."""
    directory = tmp_path_factory.mktemp("device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CUDA", str(directory))
        yield directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that lacks embedding and head."""
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(directory / "target", dtype=torch.float32, num_hidden_layers=3)
    return target, write_tiny_draft(directory / "draft", draft_vocab_size=320, head=False)


def start_target(models: tuple[Path, Path]) -> Service:
    return Service("tests.fake_cuda", "target_service", *ANY, "--model", models[0], "--kv-cache", "16MiB")


def start_draft(models: tuple[Path, Path], target: Service, **environment: str) -> Service:
    flags = [*ANY, "--model", models[1], "--target", target.address, "--kv-cache", "16MiB", "--no-self-test"]
    return Service("tests.fake_cuda", "draft_service", *flags, environment=environment)


@pytest.fixture
def services(device: Path, models: tuple[Path, Path]) -> Iterator[Trio]:
    with (
        start_target(models) as target,
        start_draft(models, target) as draft,
        start_gateway([f"{target.address}={draft.address}"]) as gateway,
    ):
        eventually(lambda: gateway.metric("outrider_peer_available") == 2, 60.0, dump=[target, draft, gateway])
        trio = Trio(target, draft, gateway)
        yield trio
        trio.target.kill()


def mapped(service: Service, device: Path) -> set[str]:
    """Which of the device's memory a process has open."""
    lines = Path(f"/proc/{service.process.pid}/maps").read_text().splitlines()
    return {Path(line.split()[5]).name for line in lines if str(device) in line}


async def info_of(draft: Service) -> draft_pb2.GetDraftInfoResponse:
    client = DraftClient(draft.address)
    try:
        return await client.info()
    finally:
        await client.close()


async def test_states_and_weights_pass_through_the_device_and_are_fetched_anew_of_a_new_target(
    services: Trio, device: Path, models: tuple[Path, Path]
) -> None:
    first = await info_of(services.draft)
    assert list(first.transports) == [CUDA_IPC, INLINE]
    await check_drafted(services.gateway, CASES)
    for service in (services.target, services.draft):
        assert service.metric("outrider_hidden_state_bytes_total", transport="cuda_ipc") > 0
        assert service.metric("outrider_hidden_state_bytes_total", transport="shared_memory") == 0
    files = {path.name for path in device.iterdir()}
    assert len(files) == 3, "the embedding, the head, and the buffer"
    assert mapped(services.draft, device) == mapped(services.target, device) == files

    # New weights beside the old ones borrow the same, and go on with them.
    services.draft.hang_up()
    eventually(lambda: "attached" in services.draft.text.partition("SIGHUP: loading")[2], 60.0, dump=[services.draft])
    eventually(lambda: services.gateway.metric("outrider_peer_available", kind="draft") == 1, 60.0)
    await check_drafted(services.gateway, CASES)
    assert mapped(services.draft, device) == files

    # The target is lost. What it leaves behind is garbage: who reads it now proposes nothing of use.
    services.target.kill()
    eventually(lambda: not mapped(services.draft, device), 60.0, dump=[services.draft])
    for path in device.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
        path.unlink()
    services.target = await asyncio.to_thread(services.target.restarted)
    eventually(lambda: services.gateway.metric("outrider_peer_available", kind="draft") == 1, 60.0)
    assert (await info_of(services.draft)).instance_id != first.instance_id
    await check_drafted(services.gateway, CASES)
    assert mapped(services.draft, device) == {path.name for path in device.iterdir()}
    eventually(services.at_rest, 30.0, dump=services.services)
    eventually(services.all_slices_back, 30.0, dump=services.services)


WAYS: dict[str, tuple[dict[str, str], common_pb2.Transport, int, str]] = {
    # environment of the draft: (its transport, how many of the target's tensors and buffers it has open, what it says)
    "peer": ({"FAKE_CUDA_DEVICE": "two", "FAKE_CUDA_PEERS": "one"}, CUDA_IPC, 1, ""),
    "no peer": ({"FAKE_CUDA_DEVICE": "two"}, SHARED_MEMORY, 0, "expected that of two or of a peer, found that of one"),
    "no IPC": ({"FAKE_CUDA_FAILS": "cudaIpcOpenMemHandle"}, SHARED_MEMORY, 0, "cudaIpcOpenMemHandle: "),
}


async def test_a_draft_that_cannot_open_device_memory_takes_the_next_best(
    device: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with start_target(models) as target:
        for name, (environment, transport, num_mapped, text) in WAYS.items():
            with start_draft(models, target, **environment) as draft:
                assert list((await info_of(draft)).transports) == [transport, INLINE], name
                assert len(mapped(draft, device)) == num_mapped, name
                assert text in draft.text, name
                if name == "no peer":
                    continue  # it goes on as the last one does
                with start_gateway([f"{target.address}={draft.address}"]) as gateway:
                    eventually(lambda front=gateway: front.metric("outrider_peer_available") == 2, 60.0)
                    await check_drafted(gateway, CASES)
