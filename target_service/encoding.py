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
    response = target_pb2.VerifyResponse()
    for event in events:
        _fill_event(response.events.add(), event)
    _fill_stats(response.stats, stats)
    return response


# Field by field, and in place: a message that is given to another is copied, and names of fields take long to read.


def _fill_event(message: target_pb2.TargetEvent, event: Event) -> None:
    """One event."""
    message.sequence_id = event.sequence_id
    if isinstance(event, Failed):
        message.error.CopyFrom(to_status(event.error))
        return
    timing = event.timing
    message.queue_us, message.compute_us = microseconds(timing.queue), microseconds(timing.compute)
    if isinstance(event, Advanced):
        _fill_advanced(message.advanced, event)
    else:
        _fill_prefilled(message.prefilled, event)


def _fill_stats(message: target_pb2.StepStats, stats: Stats) -> None:
    """What the newest step did."""
    message.SetInParent()  # there even where all of it is zero
    message.batch_size, message.num_tokens = stats.batch_size, stats.num_tokens
    message.compute_us = microseconds(stats.compute)
    message.queue_depth, message.kv_cache_usage = stats.queue_depth, stats.kv_cache_usage


def _fill_advanced(message: target_pb2.TargetEvent.Advanced, event: Advanced) -> None:
    message.token_ids.extend(event.token_ids)
    message.num_accepted = event.num_accepted
    message.finish_reason = event.finish_reason
    if event.rows is not None:
        _fill_rows(message.hidden_states, event.rows)
    if event.logprobs:
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
