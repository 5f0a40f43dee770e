"""What a target with a device shares with a draft: hidden states and weights, between real processes.

The device is tests/fake_cuda.py's; tests/device/test_cuda_ipc.py does the same with a real one.
"""

import hashlib
from contextlib import contextmanager

import pytest
import torch

from kernels import native
from outrider import cuda_memory
from outrider.shared_buffers import CUDA_IPC, INLINE, SHARED_MEMORY, open_buffer
from outrider.tensors import tensor_bytes
from outrider.v1 import target_pb2
from target_service.models import load_model
from tests.fake_cuda import FakeDevice
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.attached_draft import Draft, advanced_after_prefill
from tests.target_service.client import Client, rows

PROMPT = list(range(5, 45))
ALL = (CUDA_IPC, SHARED_MEMORY, INLINE)
SHARED = target_pb2.FetchSharedWeightsRequest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float32)


@contextmanager
def start_target(checkpoint, directory, fails=""):
    environment = {"FAKE_CUDA": str(directory), "FAKE_CUDA_FAILS": fails}
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    flags += ["--shared-memory", "64KiB", "--step-tokens", "32"]
    with Service("tests.fake_cuda", "target_service", *flags, environment=environment) as service:
        yield service


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def target(checkpoint, directory):
    with start_target(checkpoint, directory) as service:
        yield service


async def rows_of(session, draft, source, **aux):
    """The states of the prompt once they come as `source`, a slice or data: the target takes note of a draft soon."""
    found, sources = None, set()
    while sources != {source}:
        found, sources = await _rows_of(session, draft, aux)
    return found


async def _rows_of(session, draft, aux):
    sequence = await session.open(PROMPT, aux=aux)
    prefilled, advanced = await advanced_after_prefill(session, sequence)
    await session.close(sequence)
    events = [*prefilled, advanced]
    found = [draft.read(event) if event.hidden_states.tensor.HasField("slice") else rows(event)[1] for event in events]
    return torch.cat(found), {event.hidden_states.tensor.WhichOneof("source") for event in events}


@pytest.mark.parametrize("transports", [ALL, ALL[1:]], ids=["cuda_ipc", "shared_memory"])
async def test_states_come_by_the_best_transport_that_both_have(target, directory, transports):
    name = "cuda_ipc" if transports is ALL else "shared_memory"
    async with Client(target.address) as client, client.session() as session:
        assert tuple((await client.info()).transports) == ALL
        before = target.metric("outrider_hidden_state_bytes_total", transport=name)
        draft = Draft(client, transports=transports, device=FakeDevice(directory))
        (handle,) = (await draft.attach()).buffers
        found = handle.transport, handle.device_uuid, handle.size
        # On the device four chunks of 32 rows, with three boundaries of 64 floats.
        assert found == ((CUDA_IPC, "one", 4 * 32 * 3 * 64 * 4) if name == "cuda_ipc" else (SHARED_MEMORY, "", 65536))
        await draft.open()
        expected = await rows_of(session, draft, "data", boundaries=[1, 4])
        assert torch.equal(await rows_of(session, draft, "slice", **draft.aux), expected)
        assert target.metric("outrider_hidden_state_bytes_total", transport=name) >= before + expected.nbytes
        await draft.detach()


async def test_device_memory_that_a_draft_may_still_have_open_is_not_freed_but_used_again(target, directory):
    files = set(directory.iterdir())
    async with Client(target.address) as client, client.session() as session:
        for number in range(3):
            # The engine takes commands in order: behind this one, what the draft before left is there again.
            await session.advanced(await session.open(PROMPT))
            draft = Draft(client, f"draft-{number}", ALL, FakeDevice(directory))
            await draft.attach()
            await draft.open()
            assert not draft.buffer.bytes.eq(255).all(), "what was freed is full of 255"
            await draft.detach()
            assert set(directory.iterdir()) == files


async def test_weights_are_opened_where_they_lie(target, directory, checkpoint):
    async with Client(target.address) as client:
        for number in (SHARED.SHARED_TENSOR_EMBED_TOKENS, SHARED.SHARED_TENSOR_LM_HEAD):
            inline = [message async for message in client.stub.FetchSharedWeights(SHARED(tensor=number))]
            wanted = SHARED(tensor=number, transport=CUDA_IPC)
            (message,) = [message async for message in client.stub.FetchSharedWeights(wanted)]
            assert (message.dtype, message.shape) == (inline[0].dtype, inline[0].shape)
            assert message.sha256 == inline[-1].sha256
            opened = open_buffer(message.buffer, FakeDevice(directory))
            assert hashlib.sha256(tensor_bytes(opened.bytes)).hexdigest() == message.sha256
            opened.bytes[:4] = 1  # the model's own tensor, not a copy of it: whoever opens it next sees this
            again = open_buffer(message.buffer, FakeDevice(directory))
            assert again.bytes[:4].tolist() == [1] * 4


async def test_a_device_that_shares_nothing_leaves_the_hosts_memory(tmp_path, checkpoint):
    with start_target(checkpoint, tmp_path, fails="cudaIpcGetMemHandle cudaHostRegister") as target:
        async with Client(target.address) as client, client.session() as session:
            assert tuple((await client.info()).transports) == ALL[1:]
            draft = Draft(client, transports=ALL, device=FakeDevice(tmp_path))
            (handle,) = (await draft.attach()).buffers
            assert handle.transport == SHARED_MEMORY
            await draft.open()
            expected = await rows_of(session, draft, "data", boundaries=[1, 4])
            assert torch.equal(await rows_of(session, draft, "slice", **draft.aux), expected)
            wanted = SHARED(tensor=SHARED.SHARED_TENSOR_LM_HEAD, transport=CUDA_IPC)
            messages = [message async for message in client.stub.FetchSharedWeights(wanted)]
            assert messages[0].WhichOneof("payload") == "chunk"
        assert not list(tmp_path.iterdir()), "what cannot be shared is not held"


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_reads_the_memory_that_it_shares(tmp_path, monkeypatch, tied):
    checkpoint = write_tiny_llama(tmp_path / "llama", dtype=torch.float32, tie_word_embeddings=tied)
    monkeypatch.setattr(cuda_memory, "sharing_device", lambda device: FakeDevice(tmp_path))
    with native.form("torch"):  # which takes weights as they are, as the Triton form does
        model = load_model(checkpoint)
    used = [model._embedding.data_ptr(), model._head.weight.data_ptr()]
    assert used == [memory.bytes.data_ptr() for memory in (model.embed_memory, model.head_memory)]
    assert (used[0] == used[1]) == tied
    assert model.shared_bytes == (1 if tied else 2) * model.embed_weight.nbytes


def test_a_tensor_that_is_cast_is_not_shared(tmp_path, monkeypatch):
    checkpoint = write_tiny_llama(tmp_path / "llama", dtype=torch.bfloat16)
    monkeypatch.setattr(cuda_memory, "sharing_device", lambda device: FakeDevice(tmp_path))
    model = load_model(checkpoint, dtype="float32")
    assert model.embed_memory is None and model.head_memory is None
