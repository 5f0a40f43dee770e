"""The heart of the gateway: how a request is run, round by round."""

from __future__ import annotations

import asyncio
from time import perf_counter

from gateway.draft_session import Chain
from gateway.drafting import Drafting
from gateway.fleet import Fleet
from gateway.metrics import RoundTimes
from gateway.pairs import Target
from gateway.recovery import Recovery
from gateway.request import Request
from gateway.streams import after_writes
from gateway.target_session import SequenceLost, TargetSequence
from outrider.v1 import target_pb2


async def generate(request: Request, fleet: Fleet, recover_within: float) -> None:
    """Runs a request to its end, whatever happens to its target and its draft.

    Raises the error that the client is told. Whoever cancels it frees everything that it holds.
    """
    drafting = Drafting(request)
    recovery = Recovery(request, fleet, recover_within)
    request.greet()
    try:
        while not request.finished:
            target = await recovery.find_target()
            try:
                await run_on(target, request, drafting, recovery)
            except SequenceLost as loss:
                recovery.after(loss, target)
    finally:
        drafting.close()


async def run_on(target: Target, request: Request, drafting: Drafting, recovery: Recovery) -> None:
    """Runs a request on one target, from wherever it stands, until it has ended or the target has lost it."""
    sequence = target.open(request.open_command(drafting.begin(target)))
    try:
        await prefill(request, sequence, drafting)
        recovery.progressed()
        begun = perf_counter()
        while not request.finished:
            recovery.leave_if_draining(target)
            if drafting.pair_continues:
                begun = await hear_of_round(request, sequence, drafting)
            else:
                begun = await run_round(request, sequence, drafting, begun)
            recovery.progressed()
    finally:
        sequence.close()
        request.tell()


async def prefill(request: Request, sequence: TargetSequence, drafting: Drafting) -> None:
    """Has all tokens so far computed, which yields one more."""
    while True:
        event = await sequence.next_event()
        request.begin_prefill(event)
        if event.HasField("advanced"):
            drafting.take_advanced(event.advanced)
            request.accept(event.advanced, None)
            request.tell()
            return
        drafting.take_prefilled(event.prefilled)
        request.take_prefilled(event.prefilled)


async def run_round(request: Request, sequence: TargetSequence, drafting: Drafting, begun: float) -> float:
    """One round: take the chain, have it verified, pass the truth on. Returns when it was over: the next one began.

    The services come first. The client is told while the draft works, or, without one, while the next step does.
    """
    chain = await drafting.chain()
    proposed = perf_counter()
    aux = drafting.aux_change()
    sequence.advance(chain.token_ids, aux, drafting.grant(chain, aux))
    if request.untold:
        await asyncio.sleep(0)  # the target is written to first: it works while the client is told
        request.tell()
    event = await verified_event(sequence, chain)
    verified = perf_counter()
    draft_works = drafting.take_advanced(event.advanced)
    over = perf_counter()
    if draft_works:
        await asyncio.sleep(0)  # as the target before
    num_accepted = request.accept(event.advanced, len(chain.token_ids))
    times = RoundTimes(proposed - begun, verified - proposed, over - verified)
    after_writes(count_round, request, chain, event, num_accepted, times)
    if draft_works or drafting.pair_continues:
        request.tell()
    return over


async def hear_of_round(request: Request, sequence: TargetSequence, drafting: Drafting) -> float:
    """One round that target and draft, or the target alone, run: say how far, hear of it, tell the client.

    Returns when it was over.
    """
    if (grant := drafting.regrant()) is not None:
        sequence.grant(grant)
    begun = sequence.event_time
    event = await sequence.next_event()
    chain = drafting.pair_chain(event.advanced)
    drafting.take_advanced(event.advanced)
    num_accepted = request.accept(event.advanced, len(chain.token_ids))
    # What the gateway does meanwhile holds nothing up.
    times = RoundTimes(chain.waited, max(sequence.event_time - begun - chain.waited, 0.0), 0.0)
    after_writes(count_round, request, chain, event, num_accepted, times)
    request.tell()
    return perf_counter()


def count_round(
    request: Request, chain: Chain, event: target_pb2.TargetEvent, num_accepted: int, times: RoundTimes
) -> None:
    """Takes a round into the metrics, while the next one is under way."""
    if chain.metrics is not None:
        chain.metrics.count_round(len(chain.token_ids), num_accepted, event.advanced.HasField("pair_round"))
    elif event.advanced.HasField("pair_round"):
        request.metrics.target_rounds.inc()
    request.metrics.time_round(chain, event, times)


async def verified_event(sequence: TargetSequence, chain: Chain) -> target_pb2.TargetEvent:
    """The answer to an Advance. The chain of one that is never answered was lost."""
    try:
        return await sequence.next_event()
    except BaseException:
        if chain.metrics is not None:
            chain.metrics.discard("lost", len(chain.token_ids))
        raise
