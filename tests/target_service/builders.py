"""Schedulers and sequences without a model, and what the engine would do with a plan."""

import torch

from kernels.sampling import SamplingParams
from outrider.pages import PageAllocator
from target_service.commands import Advance, AuxRequest, Open
from target_service.limits import Limits
from target_service.scheduler import Scheduler
from target_service.sequence import Sequence
from target_service.verification import EndingRules

PAGE = 4
LIMITS = Limits(
    vocab_size=100,
    num_layers=2,
    max_sequence_length=36,
    max_draft_tokens=4,
    max_sequences=5,
    max_queue=100,
    step_tokens=8,
)


def make_scheduler(num_pages=10, **changes):
    return Scheduler(Limits(**{**LIMITS.__dict__, **changes}), PageAllocator(num_pages, PAGE))


def make_open(order, num_tokens, arrival=0, max_new_tokens=0, session=None):
    return Open(
        session=session,
        sequence_id=order,
        token_ids=torch.arange(num_tokens),
        num_generated=0,
        sampling=SamplingParams(temperature=0),
        ending=EndingRules(frozenset(), LIMITS.max_sequence_length, 0, max_new_tokens),
        top_logprobs=None,
        top_prompt_logprobs=None,
        aux=AuxRequest(),
        arrival_unix_us=arrival,
        request_id="",
        received=0.0,
    )


def make_sequence(order, num_tokens, **fields):
    return Sequence.of(make_open(order, num_tokens, **fields), order)


def compute(scheduler, plan, now, accepted=10**9):
    """What the engine does with a plan: rows are computed, at most `accepted` draft tokens of a chain are right."""
    finished = []
    for work in plan.work:
        sequence = work.sequence
        assert len(sequence.pages) * PAGE >= work.start + work.count, "a row without a page"
        assert work.start == (sequence.length - 1 if work.verifies else sequence.computed)
        if not work.verifies:
            sequence.computed += work.count
        if work.num_choices:
            emitted = min(work.num_choices, accepted + 1)
            sequence.append([1] * emitted)
            sequence.advance, sequence.idle_since = None, now
            if sequence.length >= LIMITS.max_sequence_length:
                scheduler.release(sequence)
                finished.append(sequence)
    return finished


def advance(sequence, num_draft_tokens=0):
    sequence.advance = Advance(None, sequence.open.sequence_id, [1] * num_draft_tokens, None, 0.0)
    sequence.idle_since = None


def prefill(scheduler, now=0.0):
    """Steps until nothing is left to prefill."""
    while scheduler.has_work():
        compute(scheduler, scheduler.plan(now), now)
