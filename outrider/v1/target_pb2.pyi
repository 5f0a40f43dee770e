from google.rpc import status_pb2 as _status_pb2
from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTargetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "instance_id", "vocab_size", "hidden_size", "num_layers", "max_sequence_length", "aux_boundaries", "weights_fingerprint", "eos_token_ids", "kv_cache_tokens", "max_sequences", "max_draft_tokens", "transports", "tokenizer_sha256", "vocabulary_sha256", "features", "synthetic")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    AUX_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SHA256_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    instance_id: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_sequence_length: int
    aux_boundaries: _containers.RepeatedScalarFieldContainer[int]
    weights_fingerprint: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cache_tokens: int
    max_sequences: int
    max_draft_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
    tokenizer_sha256: str
    vocabulary_sha256: str
    features: _containers.RepeatedScalarFieldContainer[str]
    synthetic: bool
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., instance_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., aux_boundaries: _Optional[_Iterable[int]] = ..., weights_fingerprint: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., kv_cache_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ..., tokenizer_sha256: _Optional[str] = ..., vocabulary_sha256: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., synthetic: bool = ...) -> None: ...

class FetchSharedWeightsRequest(_message.Message):
    __slots__ = ("tensor", "transport", "offset")
    class SharedTensor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SHARED_TENSOR_UNSPECIFIED: _ClassVar[FetchSharedWeightsRequest.SharedTensor]
        SHARED_TENSOR_EMBED_TOKENS: _ClassVar[FetchSharedWeightsRequest.SharedTensor]
        SHARED_TENSOR_LM_HEAD: _ClassVar[FetchSharedWeightsRequest.SharedTensor]
    SHARED_TENSOR_UNSPECIFIED: FetchSharedWeightsRequest.SharedTensor
    SHARED_TENSOR_EMBED_TOKENS: FetchSharedWeightsRequest.SharedTensor
    SHARED_TENSOR_LM_HEAD: FetchSharedWeightsRequest.SharedTensor
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    tensor: FetchSharedWeightsRequest.SharedTensor
    transport: _common_pb2.Transport
    offset: int
    def __init__(self, tensor: _Optional[_Union[FetchSharedWeightsRequest.SharedTensor, str]] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchSharedWeightsResponse(_message.Message):
    __slots__ = ("dtype", "shape", "chunk", "buffer", "sha256")
    class Chunk(_message.Message):
        __slots__ = ("offset", "data")
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        offset: int
        data: bytes
        def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    dtype: _common_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    chunk: FetchSharedWeightsResponse.Chunk
    buffer: BufferHandle
    sha256: str
    def __init__(self, dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., chunk: _Optional[_Union[FetchSharedWeightsResponse.Chunk, _Mapping]] = ..., buffer: _Optional[_Union[BufferHandle, _Mapping]] = ..., sha256: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("draft", "opened", "released")
    class AttachDraft(_message.Message):
        __slots__ = ("draft_instance_id", "transports", "pair_rounds")
        DRAFT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
        PAIR_ROUNDS_FIELD_NUMBER: _ClassVar[int]
        draft_instance_id: str
        transports: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
        pair_rounds: bool
        def __init__(self, draft_instance_id: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ..., pair_rounds: bool = ...) -> None: ...
    class BuffersOpened(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class BufferReleased(_message.Message):
        __slots__ = ("buffer_id", "generations")
        BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATIONS_FIELD_NUMBER: _ClassVar[int]
        buffer_id: str
        generations: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, buffer_id: _Optional[str] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    draft: AttachRequest.AttachDraft
    opened: AttachRequest.BuffersOpened
    released: AttachRequest.BufferReleased
    def __init__(self, draft: _Optional[_Union[AttachRequest.AttachDraft, _Mapping]] = ..., opened: _Optional[_Union[AttachRequest.BuffersOpened, _Mapping]] = ..., released: _Optional[_Union[AttachRequest.BufferReleased, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("target_instance_id", "buffers", "socket_name")
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    target_instance_id: str
    buffers: _containers.RepeatedCompositeFieldContainer[BufferHandle]
    socket_name: str
    def __init__(self, target_instance_id: _Optional[str] = ..., buffers: _Optional[_Iterable[_Union[BufferHandle, _Mapping]]] = ..., socket_name: _Optional[str] = ...) -> None: ...

class FetchTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchTokenizerResponse(_message.Message):
    __slots__ = ("file", "data", "sha256")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    file: str
    data: bytes
    sha256: str
    def __init__(self, file: _Optional[str] = ..., data: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class BufferHandle(_message.Message):
    __slots__ = ("buffer_id", "transport", "handle", "size", "offset", "device_uuid")
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    buffer_id: str
    transport: _common_pb2.Transport
    handle: bytes
    size: int
    offset: int
    device_uuid: str
    def __init__(self, buffer_id: _Optional[str] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., handle: _Optional[bytes] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("sequence_id", "open", "advance", "close", "grant")
    class OpenSequence(_message.Message):
        __slots__ = ("token_ids", "num_generated", "sampling", "max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos", "logprobs", "aux", "prompt_logprobs", "arrival_unix_us", "request_id", "traceparent")
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
        MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
        STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        AUX_FIELD_NUMBER: _ClassVar[int]
        PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        ARRIVAL_UNIX_US_FIELD_NUMBER: _ClassVar[int]
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        num_generated: int
        sampling: _common_pb2.SamplingParams
        max_new_tokens: int
        min_new_tokens: int
        stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
        ignore_eos: bool
        logprobs: _common_pb2.LogprobParams
        aux: TargetCommand.AuxRequest
        prompt_logprobs: _common_pb2.LogprobParams
        arrival_unix_us: int
        request_id: str
        traceparent: str
        def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_generated: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[_Union[_common_pb2.LogprobParams, _Mapping]] = ..., aux: _Optional[_Union[TargetCommand.AuxRequest, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.LogprobParams, _Mapping]] = ..., arrival_unix_us: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...
    class AuxRequest(_message.Message):
        __slots__ = ("boundaries", "transport", "draft_instance_id", "first_position")
        BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
        TRANSPORT_FIELD_NUMBER: _ClassVar[int]
        DRAFT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
        boundaries: _containers.RepeatedScalarFieldContainer[int]
        transport: _common_pb2.Transport
        draft_instance_id: str
        first_position: int
        def __init__(self, boundaries: _Optional[_Iterable[int]] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., draft_instance_id: _Optional[str] = ..., first_position: _Optional[int] = ...) -> None: ...
    class AdvanceSequence(_message.Message):
        __slots__ = ("draft_token_ids", "aux")
        DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        AUX_FIELD_NUMBER: _ClassVar[int]
        draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
        aux: TargetCommand.AuxRequest
        def __init__(self, draft_token_ids: _Optional[_Iterable[int]] = ..., aux: _Optional[_Union[TargetCommand.AuxRequest, _Mapping]] = ...) -> None: ...
    class CloseSequence(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class GrantRounds(_message.Message):
        __slots__ = ("draft_instance_id", "link_id", "until_length", "num_draft_tokens", "timeout_us")
        DRAFT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        LINK_ID_FIELD_NUMBER: _ClassVar[int]
        UNTIL_LENGTH_FIELD_NUMBER: _ClassVar[int]
        NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
        draft_instance_id: str
        link_id: int
        until_length: int
        num_draft_tokens: int
        timeout_us: int
        def __init__(self, draft_instance_id: _Optional[str] = ..., link_id: _Optional[int] = ..., until_length: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., timeout_us: _Optional[int] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    open: TargetCommand.OpenSequence
    advance: TargetCommand.AdvanceSequence
    close: TargetCommand.CloseSequence
    grant: TargetCommand.GrantRounds
    def __init__(self, sequence_id: _Optional[int] = ..., open: _Optional[_Union[TargetCommand.OpenSequence, _Mapping]] = ..., advance: _Optional[_Union[TargetCommand.AdvanceSequence, _Mapping]] = ..., close: _Optional[_Union[TargetCommand.CloseSequence, _Mapping]] = ..., grant: _Optional[_Union[TargetCommand.GrantRounds, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("events", "stats")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    stats: StepStats
    def __init__(self, events: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ..., stats: _Optional[_Union[StepStats, _Mapping]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("sequence_id", "prefilled", "advanced", "error", "queue_us", "compute_us")
    class Prefilled(_message.Message):
        __slots__ = ("num_computed", "hidden_states", "prompt_logprobs", "num_cached", "first_logprob_position")
        NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
        PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
        FIRST_LOGPROB_POSITION_FIELD_NUMBER: _ClassVar[int]
        num_computed: int
        hidden_states: _common_pb2.HiddenStates
        prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
        num_cached: int
        first_logprob_position: int
        def __init__(self, num_computed: _Optional[int] = ..., hidden_states: _Optional[_Union[_common_pb2.HiddenStates, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., num_cached: _Optional[int] = ..., first_logprob_position: _Optional[int] = ...) -> None: ...
    class Advanced(_message.Message):
        __slots__ = ("token_ids", "num_accepted", "hidden_states", "logprobs", "finish_reason", "continues", "pair_round")
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        CONTINUES_FIELD_NUMBER: _ClassVar[int]
        PAIR_ROUND_FIELD_NUMBER: _ClassVar[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        num_accepted: int
        hidden_states: _common_pb2.HiddenStates
        logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
        finish_reason: _common_pb2.FinishReason
        continues: bool
        pair_round: TargetEvent.PairRound
        def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., hidden_states: _Optional[_Union[_common_pb2.HiddenStates, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., continues: bool = ..., pair_round: _Optional[_Union[TargetEvent.PairRound, _Mapping]] = ...) -> None: ...
    class PairRound(_message.Message):
        __slots__ = ("draft_token_ids", "draft_queue_us", "draft_compute_us", "waited_us", "no_chain", "num_late", "num_cut")
        class NoChain(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            NO_CHAIN_UNSPECIFIED: _ClassVar[TargetEvent.PairRound.NoChain]
            NO_CHAIN_EMPTY: _ClassVar[TargetEvent.PairRound.NoChain]
            NO_CHAIN_LATE: _ClassVar[TargetEvent.PairRound.NoChain]
            NO_CHAIN_LOST: _ClassVar[TargetEvent.PairRound.NoChain]
        NO_CHAIN_UNSPECIFIED: TargetEvent.PairRound.NoChain
        NO_CHAIN_EMPTY: TargetEvent.PairRound.NoChain
        NO_CHAIN_LATE: TargetEvent.PairRound.NoChain
        NO_CHAIN_LOST: TargetEvent.PairRound.NoChain
        DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        DRAFT_QUEUE_US_FIELD_NUMBER: _ClassVar[int]
        DRAFT_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
        WAITED_US_FIELD_NUMBER: _ClassVar[int]
        NO_CHAIN_FIELD_NUMBER: _ClassVar[int]
        NUM_LATE_FIELD_NUMBER: _ClassVar[int]
        NUM_CUT_FIELD_NUMBER: _ClassVar[int]
        draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
        draft_queue_us: int
        draft_compute_us: int
        waited_us: int
        no_chain: TargetEvent.PairRound.NoChain
        num_late: int
        num_cut: int
        def __init__(self, draft_token_ids: _Optional[_Iterable[int]] = ..., draft_queue_us: _Optional[int] = ..., draft_compute_us: _Optional[int] = ..., waited_us: _Optional[int] = ..., no_chain: _Optional[_Union[TargetEvent.PairRound.NoChain, str]] = ..., num_late: _Optional[int] = ..., num_cut: _Optional[int] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    ADVANCED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prefilled: TargetEvent.Prefilled
    advanced: TargetEvent.Advanced
    error: _status_pb2.Status
    queue_us: int
    compute_us: int
    def __init__(self, sequence_id: _Optional[int] = ..., prefilled: _Optional[_Union[TargetEvent.Prefilled, _Mapping]] = ..., advanced: _Optional[_Union[TargetEvent.Advanced, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...

class StepStats(_message.Message):
    __slots__ = ("batch_size", "num_tokens", "compute_us", "queue_depth", "kv_cache_usage")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    num_tokens: int
    compute_us: int
    queue_depth: int
    kv_cache_usage: float
    def __init__(self, batch_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., compute_us: _Optional[int] = ..., queue_depth: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...
