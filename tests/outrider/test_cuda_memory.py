"""Device memory between two processes, over a CUDA runtime that keeps it in files."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.cuda_memory import CudaError, sharing_device
from outrider.dlpack import tensor_over
from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.shared_buffers import CUDA_IPC, SHARED_MEMORY, DeviceBuffer, HostBuffer, open_buffer
from outrider.shared_memory import SharedSegment
from outrider.shared_slices import SliceWriter, tensor_at
from outrider.v1 import target_pb2
from tests.fake_cuda import FakeDevice

READER = """
import sys
from pathlib import Path
import torch
from outrider.shared_buffers import open_buffer
from outrider.shared_slices import tensor_at
from outrider.v1 import target_pb2
from tests.fake_cuda import FakeDevice

handle = target_pb2.BufferHandle.FromString(bytes.fromhex(sys.argv[2]))
buffer = open_buffer(handle, FakeDevice(Path(sys.argv[1])))
rows = tensor_at(buffer.bytes, int(sys.argv[3]), torch.bfloat16, (2, 3))
print(rows.tolist())
buffer.close()
buffer.close()
print(rows.isnan().all().item())
"""


@pytest.fixture
def device(tmp_path):
    return FakeDevice(tmp_path)


def test_another_process_reads_what_lies_there_until_it_closes_it(tmp_path, device):
    buffer = DeviceBuffer(device, 4096)
    writer = SliceWriter(buffer.bytes)
    writer.allocate(640, owner=1)
    rows = torch.arange(6.0).view(2, 3).bfloat16()
    granted = writer.write(rows, owner=1)
    handle = buffer.handle("t/1")
    assert (handle.transport, handle.size, handle.device_uuid, len(handle.handle)) == (CUDA_IPC, 4096, "one", 64)
    found = subprocess.run(
        [sys.executable, "-c", READER, tmp_path, handle.SerializeToString().hex(), str(granted.offset)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"{rows.tolist()}\nTrue\n", "closed once, and not to be read afterwards"
    assert torch.equal(tensor_at(buffer.bytes, granted.offset, torch.bfloat16, (2, 3)), rows)


def test_a_block_of_its_own_for_each_buffer(tmp_path, device):
    DeviceBuffer(device, 100)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [2 << 20]


def test_what_opens_a_buffer_twice_closes_it_twice(tmp_path, device):
    buffer = DeviceBuffer(device, 64)
    buffer.bytes.fill_(7)
    reader = FakeDevice(tmp_path)
    first, second = (open_buffer(buffer.handle(""), reader) for _ in range(2))
    first.close()
    assert second.bytes.tolist() == [7] * 64
    second.close()
    assert second.bytes.tolist() == [255] * 64


def test_only_a_devices_own_memory_and_a_peers_is_opened(tmp_path, device):
    handle = DeviceBuffer(device, 64).handle("")
    assert open_buffer(handle, FakeDevice(tmp_path)).is_local
    assert not open_buffer(handle, FakeDevice(tmp_path, "two", peers=["one"])).is_local
    alone = FakeDevice(tmp_path, "two")
    with pytest.raises(FailedPrecondition, match="expected that of two or of a peer, found that of one"):
        open_buffer(handle, alone)
    assert not alone.calls, "compared before it is opened"
    with pytest.raises(InvalidArgument, match="can be opened here"):
        open_buffer(handle, None)
    short = target_pb2.BufferHandle(transport=CUDA_IPC, handle=b"x" * 63, device_uuid="one")
    with pytest.raises(InvalidArgument, match="expected 64 bytes, found 63"):
        open_buffer(short, FakeDevice(tmp_path))


def test_an_error_has_the_calls_name_and_is_not_left_to_be_found_by_others(tmp_path):
    reader = FakeDevice(tmp_path)
    with pytest.raises(CudaError, match=r"cudaIpcOpenMemHandle: .* \(cudaErrorMapBufferObjectFailed\)"):
        open_buffer(target_pb2.BufferHandle(transport=CUDA_IPC, handle=b"x" * 64, device_uuid="one"), reader)
    assert "cudaGetLastError" in reader.calls


def test_memory_that_cannot_be_exported_is_freed(tmp_path):
    with pytest.raises(CudaError, match="cudaIpcGetMemHandle"):
        DeviceBuffer(FakeDevice(tmp_path, fails=["cudaIpcGetMemHandle"]), 64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", [[], ["cudaHostRegister"]])
def test_host_memory_is_pinned_where_it_can_be(tmp_path, fails):
    owner, reader = FakeDevice(tmp_path, fails=fails), FakeDevice(tmp_path, fails=fails)
    buffer = HostBuffer(SharedSegment.create(4096), owner, read_only=False)
    handle = buffer.handle("t/1")
    assert (handle.transport, handle.size) == (SHARED_MEMORY, 4096)
    opened = open_buffer(handle, reader)
    buffer.bytes[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert opened.bytes[:4].tolist() == [1, 2, 3, 4]
    for side, device in ((opened, reader), (buffer, owner)):
        side.close()
        side.close()
        assert device.calls.count("cudaHostUnregister") == (not fails)


def test_a_tensor_lies_where_it_is_said_to(device):
    memory = torch.arange(8, dtype=torch.uint8)
    over = tensor_over(memory.data_ptr(), 8, torch.device("cpu"))
    over[2:4] = 9
    assert memory.tolist() == [0, 1, 9, 9, 4, 5, 6, 7]
    assert over.dtype == torch.uint8 and over.device.type == "cpu"


def test_a_cpu_shares_no_device_memory():
    assert sharing_device(torch.device("cpu")) is None
