"""What a target says of itself, sends to a draft and a gateway that start, and refuses to start with."""

import hashlib
import subprocess
import sys
from dataclasses import replace

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from outrider.checkpoint import Checkpoint
from outrider.features import TARGET_ROUNDS
from outrider.pair_socket import FEATURE
from outrider.tensors import DTYPES
from outrider.v1 import target_pb2
from target_service.loading import load_target
from target_service.metrics import TargetMetrics
from target_service.models import load_model
from target_service.settings import Settings
from target_service.shared_weights import SharedWeights
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.client import Client

EMBEDDING = target_pb2.FetchSharedWeightsRequest.SHARED_TENSOR_EMBED_TOKENS
HEAD = target_pb2.FetchSharedWeightsRequest.SHARED_TENSOR_LM_HEAD
LISTEN = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # 2.5 MB of embedding: more than two chunks.
    directory = tmp_path_factory.mktemp("llama")
    return write_tiny_llama(directory, dtype=torch.bfloat16, vocab_size=20_000, num_hidden_layers=1)


@pytest.fixture(scope="module")
def target(checkpoint):
    with Service("target_service", "--model", checkpoint, *LISTEN, "--dtype", "float32") as service:
        yield service


@pytest.fixture
async def client(target):
    async with Client(target.address) as client:
        yield client


async def fetch(client, tensor, offset=0):
    request = target_pb2.FetchSharedWeightsRequest(tensor=tensor, offset=offset)
    return [message async for message in client.stub.FetchSharedWeights(request)]


async def test_info_says_what_the_checkpoint_says(client, checkpoint):
    info = await client.info()
    assert info.model == checkpoint.name and info.architecture == "LlamaForCausalLM"
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (20_000, 64, 1)
    assert list(info.aux_boundaries) == [0, 1, 2]
    assert list(info.eos_token_ids) == [1]
    assert info.max_sequence_length == 2048
    assert info.kv_cache_tokens >= info.max_sequence_length + info.max_draft_tokens
    assert len(info.instance_id) == 32 and len(info.weights_fingerprint) == 64
    assert not info.synthetic and list(info.features) == [TARGET_ROUNDS, FEATURE]


@pytest.mark.parametrize(("tensor", "name"), [(EMBEDDING, "model.embed_tokens.weight"), (HEAD, "lm_head.weight")])
async def test_shared_weights_arrive_as_the_checkpoint_stores_them(client, checkpoint, tensor, name):
    messages = await fetch(client, tensor)
    assert len(messages) > 2
    data = b"".join(message.chunk.data for message in messages)
    stored = Checkpoint(checkpoint).load(name)
    assert DTYPES[messages[0].dtype] == stored.dtype == torch.bfloat16  # not what the target computes in
    assert list(messages[0].shape) == [20_000, 64]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(20_000, 64), stored)
    assert [message.sha256 for message in messages[:-1]] == [""] * (len(messages) - 1)
    assert messages[-1].sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("offset", [1, 1_234_567, 2_559_999, 2_560_000])
async def test_a_broken_download_is_resumed(client, offset):
    whole = b"".join(message.chunk.data for message in await fetch(client, HEAD))
    rest = await fetch(client, HEAD, offset)
    assert rest[0].chunk.offset == offset
    assert b"".join(message.chunk.data for message in rest) == whole[offset:]
    assert rest[-1].sha256 == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize(
    ("tensor", "offset", "field"), [(EMBEDDING, 2_560_001, "offset"), (0, 0, "tensor"), (9, 0, "tensor")]
)
async def test_what_does_not_exist_is_named(client, tensor, offset, field):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await fetch(client, tensor, offset)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details().startswith(field)


async def test_the_fingerprint_knows_weights_from_their_cast_and_from_others(checkpoint, client, tmp_path):
    other = write_tiny_llama(tmp_path / "other", dtype=torch.bfloat16, vocab_size=20_000, num_hidden_layers=1, seed=1)
    fingerprint = (await client.info()).weights_fingerprint
    again, different = load_model(checkpoint, "cpu", "bfloat16"), load_model(other)
    assert SharedWeights(again).fingerprint == fingerprint  # served in float32
    assert SharedWeights(different).fingerprint != fingerprint


async def test_the_tokenizer_arrives_file_by_file_with_one_digest(client, checkpoint):
    messages = [message async for message in client.stub.FetchTokenizer(target_pb2.FetchTokenizerRequest())]
    files = {}
    for message in messages:
        files[message.file] = files.get(message.file, b"") + message.data
    assert files == {name: (checkpoint / name).read_bytes() for name in files}
    known = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    assert list(files) == [name for name in known if (checkpoint / name).is_file()]
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    info = await client.info()
    assert messages[-1].sha256 == info.tokenizer_sha256 == digest

    vocabulary = Tokenizer.from_str(files["tokenizer.json"].decode()).get_vocab(with_added_tokens=True)
    lines = "".join(f"{token_id}\t{token}\n" for token_id, token in sorted((i, t) for t, i in vocabulary.items()))
    assert info.vocabulary_sha256 == hashlib.sha256(lines.encode()).hexdigest()


async def test_a_checkpoint_without_a_tokenizer_has_no_digests(tmp_path):
    checkpoint = write_tiny_llama(tmp_path / "bare", tokenizer=False, tie_word_embeddings=True)
    with Service("target_service", "--model", checkpoint, *LISTEN) as service:
        async with Client(service.address) as client:
            info = await client.info()
            assert info.tokenizer_sha256 == info.vocabulary_sha256 == ""
            files = [m.file async for m in client.stub.FetchTokenizer(target_pb2.FetchTokenizerRequest())]
            assert "tokenizer.json" not in files
            # A tied head is the embedding.
            embedding, head = await fetch(client, EMBEDDING), await fetch(client, HEAD)
            assert embedding[-1].sha256 == head[-1].sha256


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "nowhere"], "nowhere: expected a checkpoint directory"),
        (["--listen", "nonsense"], "--listen: expected HOST:PORT, found 'nonsense'"),
        (["--metrics-listen", "nonsense"], "--metrics-listen: expected HOST:PORT, found 'nonsense'"),
        (["--metrics-listen", "192.0.2.1:80"], "--metrics-listen: cannot bind 192.0.2.1:80: Cannot assign"),
        (["--shared-memory", "1EiB"], "--shared-memory: expected a size such as"),
        (["--shared-memory", "1000000TiB"], "--shared-memory: "),
    ],
)
def test_what_does_not_fit_is_refused_at_start_by_its_name(checkpoint, flags, words):
    command = [sys.executable, "-m", "target_service", "--model", checkpoint, *LISTEN, *flags]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert found.returncode == 1
    assert found.stderr.strip().splitlines()[-1].startswith("outrider target: ")
    assert words in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "tpu"}, "--device: expected auto, cpu, cuda or cuda:N, found 'tpu'"),
        ({"device": "cuda:99"}, "--device: expected a CUDA device with the index 99, found "),
        ({"dtype": "int8"}, "dtype: expected auto, float32 or bfloat16, found int8"),
        ({"kv_cache": "5kB"}, "--kv-cache: 5kB holds 0 pages"),
        ({"kv_cache": "much"}, "--kv-cache: expected a size such as 512MiB or 4GB, found 'much'"),
        ({"shared_memory": "much"}, "--shared-memory: expected a size such as 512MiB or 4GB, found 'much'"),
        ({"kv_cache": "-0.5"}, "--kv-cache"),
        ({"kv_cache": "100kB", "max_sequence_length": 2048}, "--max-sequence-length 2048"),
        ({"max_sequence_length": 9999}, "--max-sequence-length: expected at most the model's 2048, found 9999"),
        ({"shared_memory": "1MiB", "shared_memory_group": "no-such-group"}, "--shared-memory-group: expected"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint, changes, words):
    settings = Settings(
        model=checkpoint,
        name="tiny",
        device="cpu",
        dtype="auto",
        kv_cache="1MiB",
        max_sequences=2,
        max_draft_tokens=4,
        max_sequence_length=0,
        step_tokens=64,
        max_queue=4,
    )
    with pytest.raises(ValueError) as error:
        load_target(replace(settings, **changes), "id", TargetMetrics(CollectorRegistry(), "tiny"), print)
    assert words in str(error.value)
