"""Device memory between processes, with a real CUDA runtime.

Over a runtime that keeps the memory in files, tests/outrider/test_cuda_memory.py and test_device_memory.py of
tests/target_service and tests/end_to_end do the same.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from outrider.cuda_memory import CudaDevice, CudaError, sharing_device
from outrider.shared_buffers import CUDA_IPC, INLINE, SHARED_MEMORY, DeviceBuffer, HostBuffer, open_buffer
from outrider.shared_memory import SharedSegment
from outrider.shared_slices import SliceWriter
from outrider.v1 import target_pb2
from tests.draft_service.client import DraftClient
from tests.drafts import write_tiny_draft
from tests.end_to_end.services import check_drafted
from tests.end_to_end.trio import HOT
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import ANY, eventually, start_gateway

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),  # kernels are compiled
]
ROOT = Path(__file__).parents[2]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CASES = [
    {"prompt": list(range(1 + i, 150 + i)), "sampling": {**HOT, "seed": i}, "max_new_tokens": 40, "ignore_eos": True}
    for i in range(3)
]
SHAPE = (300, 8640)  # some megabytes of states

READER = """
import sys
import torch
from outrider.cuda_memory import sharing_device
from outrider.shared_buffers import open_buffer
from outrider.shared_slices import tensor_at
from outrider.v1 import target_pb2

device = torch.device(sys.argv[1])
torch.cuda.set_device(device)
handle = target_pb2.BufferHandle.FromString(bytes.fromhex(sys.argv[2]))
for _ in range(2):  # closed and opened again
    buffer = open_buffer(handle, sharing_device(device))
    rows = tensor_at(buffer.bytes, int(sys.argv[3]), torch.bfloat16, (300, 8640))
    print(buffer.bytes.device, rows.to(device, non_blocking=True).double().sum().item(), flush=True)
    torch.cuda.synchronize(device)
    buffer.close()
"""


@pytest.fixture
def device() -> CudaDevice:
    found = sharing_device(torch.device("cuda", 0))
    assert found is not None
    return found


def read_elsewhere(handle: target_pb2.BufferHandle, offset: int, device: str) -> list[list[str]]:
    """What another process finds: for each time that it opens the buffer, where, and the sum of the rows."""
    command = [sys.executable, "-c", READER, device, handle.SerializeToString().hex(), str(offset)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    return [line.split() for line in found.stdout.splitlines()]


@pytest.mark.parametrize("reader", ["cuda:0", pytest.param("cuda:1", marks=TWO)])
@pytest.mark.parametrize("kind", ["device", "host"])
def test_another_process_reads_what_was_written(device: CudaDevice, kind: str, reader: str) -> None:
    size = 32 << 20
    buffer = DeviceBuffer(device, size) if kind == "device" else HostBuffer(SharedSegment.create(size), device, False)
    if kind == "device" and reader != "cuda:0" and not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("the two devices are no peers")
    rows = torch.randn(SHAPE, device="cuda:0").bfloat16()
    writer = SliceWriter(buffer.bytes)
    writer.allocate(640, owner=1)
    granted = writer.write(rows, owner=1)
    assert granted is not None
    torch.cuda.synchronize()
    found = read_elsewhere(buffer.handle("t/1"), granted.offset, reader)
    place = reader if kind == "device" else "cpu"
    assert found == [[place, str(rows.double().sum().item())]] * 2
    if kind == "host":
        assert buffer.bytes.is_pinned(), "registered"
        buffer.close()


def test_a_reader_pins_memory_that_it_may_not_write_to(device: CudaDevice) -> None:
    segment = SharedSegment.create(1 << 20)
    opened = open_buffer(HostBuffer(segment, None, False).handle("t/1"), device)
    pinned = opened.bytes.is_pinned()
    opened.close()
    segment.close()
    if not pinned:
        pytest.skip("this driver pins no read-only mapping: the processor copies")


def test_errors_have_names_and_leave_nothing_behind(device: CudaDevice) -> None:
    with pytest.raises(CudaError, match=r"cudaIpcOpenMemHandle: .+ \(cudaError\w+\)"):
        device.open(bytes(64))
    with pytest.raises(CudaError, match=r"cudaErrorMemoryAllocation"):
        device.malloc(1 << 50)
    assert torch.ones(3, device="cuda").sum().item() == 3, "the next kernel is not taken for the one that failed"


def test_a_tensor_of_it_is_computed_with(device: CudaDevice) -> None:
    buffer = DeviceBuffer(device, 1 << 20)
    weight = buffer.bytes[: 64 * 128 * 2].view(torch.bfloat16).view(64, 128)
    weight.copy_(torch.randn(64, 128))
    x = torch.randn(5, 128, device="cuda").bfloat16()
    assert torch.equal(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, weight.clone()))
    assert weight.device == torch.device("cuda", 0) and not weight.is_pinned()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that lacks embedding and head."""
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(directory / "target", dtype=torch.bfloat16, num_hidden_layers=3)
    return target, write_tiny_draft(directory / "draft", dtype=torch.bfloat16, draft_vocab_size=320, head=False)


@contextmanager
def pair(models: tuple[Path, Path], draft_device: str, *gateway: str) -> Iterator[tuple[Service, Service, Service]]:
    flags = ["--kv-cache", "64MiB", "--device"]
    # More rows have the bits of the library's products, which depend on their number.
    served = ["--model", models[0], "--step-tokens", "64"]
    with (
        Service("target_service", *ANY, *served, *flags, "cuda:0", timeout=200) as target,
        Service(
            "draft_service",
            *(*ANY, "--model", models[1], "--target", target.address, "--no-self-test", *flags, draft_device),
            timeout=200,
        ) as draft,
        start_gateway([f"{target.address}={draft.address}"], *gateway) as front,
    ):
        eventually(lambda: front.metric("outrider_peer_available") == 2, 30.0, dump=[target, draft, front])
        yield target, draft, front


async def transports_of(draft: Service) -> list[int]:
    client = DraftClient(draft.address)
    try:
        return list((await client.info()).transports)
    finally:
        await client.close()


@pytest.mark.parametrize("draft_device", ["cuda:0", pytest.param("cuda:1", marks=TWO)])
@pytest.mark.parametrize("gateway", [[], ["--no-pair-rounds"]], ids=["pair-local", "gateway"])
async def test_a_pair_on_devices(models: tuple[Path, Path], draft_device: str, gateway: list[str]) -> None:
    reaches = draft_device == "cuda:0" or torch.cuda.can_device_access_peer(1, 0)
    expected = CUDA_IPC if reaches else SHARED_MEMORY
    with pair(models, draft_device, *gateway) as (target, draft, front):
        assert await transports_of(draft) == [expected, INLINE], draft.text
        await check_drafted(front, CASES, timeout=120)
        name = "cuda_ipc" if reaches else "shared_memory"
        for service in (target, draft):
            assert service.metric("outrider_hidden_state_bytes_total", transport=name) > 0
        eventually(lambda: target.metric("outrider_unreleased_slices") == 0, 5.0)
        copied = re.findall(r".*shared memory is copied by the processor.*", draft.text + target.text)
        print("\n".join(copied) or "host memory is pinned on both sides")


async def test_a_target_that_is_lost_takes_its_memory_with_it(models: tuple[Path, Path]) -> None:
    with pair(models, "cuda:0") as (target, draft, front):
        await check_drafted(front, CASES, timeout=120)
        target.kill()
        eventually(lambda: front.metric("outrider_peer_available") == 0, 20.0)
        again = await asyncio.to_thread(target.restarted, 200)
        try:
            eventually(lambda: front.metric("outrider_peer_available") == 2, 60.0, dump=[again, draft, front])
            assert await transports_of(draft) == [CUDA_IPC, INLINE], draft.text
            await check_drafted(front, CASES, timeout=120)
        finally:
            again.kill()
        assert draft.process.poll() is None, "no kernel has read what was closed"
