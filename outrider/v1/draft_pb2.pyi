from google.rpc import status_pb2 as _status_pb2
from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "instance_id", "target_instance_id", "weights_fingerprint", "aux_boundaries", "draft_vocab_size", "max_draft_tokens", "max_sequence_length", "transports", "vocab_size", "target_hidden_size", "vocabulary_sha256", "features", "synthetic")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AUX_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SHA256_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    instance_id: str
    target_instance_id: str
    weights_fingerprint: str
    aux_boundaries: _containers.RepeatedScalarFieldContainer[int]
    draft_vocab_size: int
    max_draft_tokens: int
    max_sequence_length: int
    transports: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
    vocab_size: int
    target_hidden_size: int
    vocabulary_sha256: str
    features: _containers.RepeatedScalarFieldContainer[str]
    synthetic: bool
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., instance_id: _Optional[str] = ..., target_instance_id: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., aux_boundaries: _Optional[_Iterable[int]] = ..., draft_vocab_size: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ..., vocab_size: _Optional[int] = ..., target_hidden_size: _Optional[int] = ..., vocabulary_sha256: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., synthetic: bool = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("sequence_id", "open", "extend", "close")
    class OpenDraft(_message.Message):
        __slots__ = ("sampling", "link_id", "request_id", "traceparent")
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        LINK_ID_FIELD_NUMBER: _ClassVar[int]
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
        sampling: _common_pb2.SamplingParams
        link_id: int
        request_id: str
        traceparent: str
        def __init__(self, sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., link_id: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...
    class ExtendDraft(_message.Message):
        __slots__ = ("hidden_states", "token_ids", "num_draft_tokens", "min_confidence")
        HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
        hidden_states: _common_pb2.HiddenStates
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        num_draft_tokens: int
        min_confidence: float
        def __init__(self, hidden_states: _Optional[_Union[_common_pb2.HiddenStates, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., min_confidence: _Optional[float] = ...) -> None: ...
    class CloseDraft(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    open: DraftCommand.OpenDraft
    extend: DraftCommand.ExtendDraft
    close: DraftCommand.CloseDraft
    def __init__(self, sequence_id: _Optional[int] = ..., open: _Optional[_Union[DraftCommand.OpenDraft, _Mapping]] = ..., extend: _Optional[_Union[DraftCommand.ExtendDraft, _Mapping]] = ..., close: _Optional[_Union[DraftCommand.CloseDraft, _Mapping]] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("sequence_id", "proposal", "error", "queue_us", "compute_us")
    class Proposal(_message.Message):
        __slots__ = ("token_ids", "probabilities", "first_position")
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
        FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        probabilities: _containers.RepeatedScalarFieldContainer[float]
        first_position: int
        def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., first_position: _Optional[int] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    proposal: DraftEvent.Proposal
    error: _status_pb2.Status
    queue_us: int
    compute_us: int
    def __init__(self, sequence_id: _Optional[int] = ..., proposal: _Optional[_Union[DraftEvent.Proposal, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...
