from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "conversation", "token_ids", "sampling", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "speculation", "prompt_logprobs", "num_generated")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    conversation: Conversation
    token_ids: TokenIds
    sampling: _common_pb2.SamplingParams
    max_new_tokens: int
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: _common_pb2.LogprobParams
    speculation: SpeculationParams
    prompt_logprobs: _common_pb2.LogprobParams
    num_generated: int
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[_Union[_common_pb2.LogprobParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.LogprobParams, _Mapping]] = ..., num_generated: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages",)
    class Message(_message.Message):
        __slots__ = ("role", "content")
        ROLE_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        role: str
        content: str
        def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Conversation.Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Conversation.Message, _Mapping]]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("max_draft_tokens", "draft_model")
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    max_draft_tokens: int
    draft_model: str
    def __init__(self, max_draft_tokens: _Optional[int] = ..., draft_model: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "finish_reason", "usage", "prompt_logprobs", "stop", "stop_token_id", "from_draft", "seed", "prompt_token_ids", "text_ends")
    class Usage(_message.Message):
        __slots__ = ("prompt_tokens", "completion_tokens", "verify_steps", "draft_tokens", "accepted_tokens", "seed", "acceptance_histogram", "drafted_per_position")
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
        VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
        DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        SEED_FIELD_NUMBER: _ClassVar[int]
        ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
        DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
        prompt_tokens: int
        completion_tokens: int
        verify_steps: int
        draft_tokens: int
        accepted_tokens: int
        seed: int
        acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
        drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., verify_steps: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., drafted_per_position: _Optional[_Iterable[int]] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_DRAFT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_ENDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    usage: GenerateResponse.Usage
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    stop: str
    stop_token_id: int
    from_draft: _containers.RepeatedScalarFieldContainer[bool]
    seed: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[GenerateResponse.Usage, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., from_draft: _Optional[_Iterable[bool]] = ..., seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., text_ends: _Optional[_Iterable[int]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    class Model(_message.Message):
        __slots__ = ("model", "drafts", "max_sequence_length", "draft_shares")
        MODEL_FIELD_NUMBER: _ClassVar[int]
        DRAFTS_FIELD_NUMBER: _ClassVar[int]
        MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
        DRAFT_SHARES_FIELD_NUMBER: _ClassVar[int]
        model: str
        drafts: _containers.RepeatedScalarFieldContainer[str]
        max_sequence_length: int
        draft_shares: _containers.RepeatedCompositeFieldContainer[ListModelsResponse.DraftShare]
        def __init__(self, model: _Optional[str] = ..., drafts: _Optional[_Iterable[str]] = ..., max_sequence_length: _Optional[int] = ..., draft_shares: _Optional[_Iterable[_Union[ListModelsResponse.DraftShare, _Mapping]]] = ...) -> None: ...
    class DraftShare(_message.Message):
        __slots__ = ("draft_model", "percent", "available")
        DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
        PERCENT_FIELD_NUMBER: _ClassVar[int]
        AVAILABLE_FIELD_NUMBER: _ClassVar[int]
        draft_model: str
        percent: float
        available: bool
        def __init__(self, draft_model: _Optional[str] = ..., percent: _Optional[float] = ..., available: bool = ...) -> None: ...
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ListModelsResponse.Model]
    def __init__(self, models: _Optional[_Iterable[_Union[ListModelsResponse.Model, _Mapping]]] = ...) -> None: ...
