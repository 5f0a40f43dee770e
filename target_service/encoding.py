"""From the engine's events to messages."""

from __future__ import annotations

from outrider.durations import microseconds
from outrider.errors import to_status
from outrider.tensors import encode
from outrider.v1 import common_pb2, target_pb2
from target_service.commands import Advanced, Event, Failed, PairRound, Prefilled, Rows, Stats
from target_service.logprobs import TokenLogprobs


def verify_response(batch: tuple[list[Event], Stats]) -> target_pb2.VerifyResponse:
    """One message of events, in their order."""
    events, stats = batch
    return target_pb2.VerifyResponse(events=map(_event_message, events), stats=_stats_message(stats))


def _event_message(event: Event) -> target_pb2.TargetEvent:
    """One event."""
    if isinstance(event, Failed):
        return target_pb2.TargetEvent(sequence_id=event.sequence_id, error=to_status(event.error))
    message = target_pb2.TargetEvent(
        sequence_id=event.sequence_id,
        queue_us=microseconds(event.timing.queue),
        compute_us=microseconds(event.timing.compute),
    )
    if isinstance(event, Advanced):
        _fill_advanced(message.advanced, event)
    else:
        _fill_prefilled(message.prefilled, event)
    return message


def _stats_message(stats: Stats) -> target_pb2.StepStats:
    """What the newest step did."""
    return target_pb2.StepStats(
        batch_size=stats.batch_size,
        num_tokens=stats.num_tokens,
        compute_us=microseconds(stats.compute),
        queue_depth=stats.queue_depth,
        kv_cache_usage=stats.kv_cache_usage,
    )


def _fill_advanced(message: target_pb2.TargetEvent.Advanced, event: Advanced) -> None:
    message.token_ids.extend(event.token_ids)
    message.num_accepted = event.num_accepted
    message.finish_reason = event.finish_reason
    if event.rows is not None:
        _fill_rows(message.hidden_states, event.rows)
    message.logprobs.extend(map(_logprobs_message, event.logprobs))
    message.continues = event.continues
    if event.pair_round is not None:
        _fill_pair_round(message.pair_round, event.pair_round)


def _fill_pair_round(message: target_pb2.TargetEvent.PairRound, pair_round: PairRound) -> None:
    message.SetInParent()  # there even where all of it is zero
    message.draft_token_ids.extend(pair_round.draft_token_ids)
    message.draft_queue_us, message.draft_compute_us = pair_round.draft_queue_us, pair_round.draft_compute_us
    message.waited_us, message.no_chain = microseconds(pair_round.waited), pair_round.no_chain
    message.num_late, message.num_cut = pair_round.num_late, pair_round.num_cut


def _fill_prefilled(message: target_pb2.TargetEvent.Prefilled, event: Prefilled) -> None:
    message.num_computed = event.num_computed
    if event.rows is not None:
        _fill_rows(message.hidden_states, event.rows)
    if event.prompt_logprobs:
        message.prompt_logprobs.extend(map(_logprobs_message, event.prompt_logprobs))
        message.first_logprob_position = event.first_logprob_position


def _fill_rows(message: common_pb2.HiddenStates, rows: Rows) -> None:
    message.first_position = rows.first_position
    message.tensor.CopyFrom(rows.tensor if isinstance(rows.tensor, common_pb2.Tensor) else encode(rows.tensor))


def _logprobs_message(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return common_pb2.TokenLogprobs(logprob=entry.logprob, rank=entry.rank, top=top)
