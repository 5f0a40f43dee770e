"""Every field of a GenerateRequest, before anything enters a session. Pure, but for the tokenizer."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.tokenizer import ModelTokenizer
from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.v1 import common_pb2, gateway_pb2, target_pb2

MAX_LOGPROBS = 1024  # alternatives per token
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Defaults:
    """What a request gets that does not say."""

    draft_tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class Admitted:
    """A valid request: everything resolved, defaults filled in, the seed drawn."""

    token_ids: list[int]
    num_generated: int
    sampling: common_pb2.SamplingParams
    max_new_tokens: int
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: common_pb2.LogprobParams | None
    prompt_logprobs: common_pb2.LogprobParams | None
    draft_tokens: int
    draft_model: str


def admit(
    request: gateway_pb2.GenerateRequest,
    target: target_pb2.GetTargetInfoResponse,
    tokenizer: ModelTokenizer | None,
    defaults: Defaults,
) -> Admitted:
    """Checks a request against what the target can do. Raises InvalidArgument naming the first field at fault."""
    vocab_size = target.vocab_size
    sampling = _sampling(request.sampling, vocab_size)
    if any(not stop for stop in request.stop):
        raise InvalidArgument("stop", "expected no empty string")
    if request.stop and tokenizer is None:
        raise FailedPrecondition(
            f"stop: the target of {target.model} has no tokenizer, so stop strings cannot be found"
        )
    _check_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    max_new_tokens = request.max_new_tokens or max(defaults.max_new_tokens, request.min_new_tokens)
    if request.min_new_tokens > max_new_tokens:
        raise InvalidArgument(
            "min_new_tokens", f"expected at most max_new_tokens, {max_new_tokens}, found {request.min_new_tokens}"
        )
    draft_tokens = _draft_tokens(request, target.max_draft_tokens, defaults.draft_tokens)
    token_ids = _prompt(request, target, tokenizer)
    _check_num_generated(request, len(token_ids), max_new_tokens)
    return Admitted(
        token_ids=token_ids,
        num_generated=request.num_generated,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        min_new_tokens=request.min_new_tokens,
        stop=tuple(dict.fromkeys(request.stop)),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=_logprobs(request, "logprobs", vocab_size),
        prompt_logprobs=_logprobs(request, "prompt_logprobs", vocab_size),
        draft_tokens=draft_tokens,
        draft_model=request.speculation.draft_model,
    )


def _prompt(
    request: gateway_pb2.GenerateRequest,
    target: target_pb2.GetTargetInfoResponse,
    tokenizer: ModelTokenizer | None,
) -> list[int]:
    """The prompt as tokens, checked for range and room."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", "expected one of text, conversation and token_ids, found none")
    if kind == "token_ids":
        token_ids = list(request.token_ids.token_ids)
        _check_ids("token_ids", token_ids, target.vocab_size)
    elif tokenizer is None:
        raise FailedPrecondition(f"{kind}: the target of {target.model} has no tokenizer; send token_ids")
    elif kind == "text":
        token_ids = tokenizer.encode(request.text)
    else:
        token_ids = tokenizer.encode_conversation(_messages(request.conversation))
    field = kind
    if not token_ids:
        raise InvalidArgument(field, "expected at least one token, found an empty prompt")
    if len(token_ids) >= target.max_sequence_length:
        raise InvalidArgument(
            field,
            f"expected fewer than {target.max_sequence_length} tokens, the longest sequence of {target.model}, "
            f"found {len(token_ids)}",
        )
    return token_ids


def _messages(conversation: gateway_pb2.Conversation) -> list[dict[str, str]]:
    if not conversation.messages:
        raise InvalidArgument("conversation.messages", "expected at least one message, found none")
    for index, message in enumerate(conversation.messages):
        if message.role not in ROLES:
            raise InvalidArgument(
                f"conversation.messages[{index}].role",
                f"expected one of {', '.join(ROLES)}, found {message.role!r:.80}",
            )
    return [{"role": message.role, "content": message.content} for message in conversation.messages]


def _sampling(params: common_pb2.SamplingParams, vocab_size: int) -> common_pb2.SamplingParams:
    """A copy with the seed drawn where there is none."""
    checks = {
        "temperature": (lambda x: x >= 0, "a finite number, at least 0"),
        "top_k": (lambda x: x >= 1, "at least 1"),
        "top_p": (lambda x: 0 < x <= 1, "more than 0, at most 1"),
        "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
        "repetition_penalty": (lambda x: x > 0, "a finite number above 0"),
        "presence_penalty": (lambda x: True, "a finite number"),
        "frequency_penalty": (lambda x: True, "a finite number"),
    }
    for name, (valid, expected) in checks.items():
        value = getattr(params, name)
        if params.HasField(name) and not (math.isfinite(value) and valid(value)):
            raise InvalidArgument(f"sampling.{name}", f"expected {expected}, found {value:g}")
    for token_id, bias in params.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidArgument(
                f"sampling.logit_bias[{token_id}]", f"expected a token below {vocab_size}, found {token_id}"
            )
        if not bias < math.inf:  # -inf bans a token
            raise InvalidArgument(
                f"sampling.logit_bias[{token_id}]", f"expected a number below infinity, found {bias:g}"
            )
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(params)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    return sampling


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidArgument(f"{field}[{index}]", f"expected a token below {vocab_size}, found {token_id}")


def _draft_tokens(request: gateway_pb2.GenerateRequest, largest: int, default: int) -> int:
    speculation = request.speculation
    if not speculation.HasField("max_draft_tokens"):
        return min(default, largest)
    if speculation.max_draft_tokens > largest:
        raise InvalidArgument(
            "speculation.max_draft_tokens",
            f"expected at most {largest}, the target's longest chain, found {speculation.max_draft_tokens}",
        )
    return int(speculation.max_draft_tokens)


def _check_num_generated(request: gateway_pb2.GenerateRequest, num_tokens: int, max_new_tokens: int) -> None:
    if request.num_generated == 0:
        return
    if request.WhichOneof("prompt") != "token_ids":
        raise InvalidArgument("num_generated", "expected 0 unless the prompt is token_ids")
    if request.num_generated >= num_tokens:
        raise InvalidArgument(
            "num_generated", f"expected fewer than the {num_tokens} token_ids, found {request.num_generated}"
        )
    if request.num_generated >= max_new_tokens:
        raise InvalidArgument(
            "num_generated", f"expected fewer than max_new_tokens, {max_new_tokens}, found {request.num_generated}"
        )
    if request.HasField("prompt_logprobs"):
        raise InvalidArgument("prompt_logprobs", "expected none where num_generated says that the prompt goes on")
    greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
    if not greedy and not request.sampling.HasField("seed"):
        raise InvalidArgument("num_generated", "expected sampling.seed, the seed that the earlier call reported")


def _logprobs(request: gateway_pb2.GenerateRequest, field: str, vocab_size: int) -> common_pb2.LogprobParams | None:
    if not request.HasField(field):
        return None
    params: common_pb2.LogprobParams = getattr(request, field)
    most = min(MAX_LOGPROBS, vocab_size)
    if params.top > most:
        raise InvalidArgument(f"{field}.top", f"expected at most {most}, found {params.top}")
    return params
