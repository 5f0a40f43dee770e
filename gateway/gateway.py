"""The gateway: admits requests, knows which run, and says whether it serves."""

from __future__ import annotations

import asyncio
import contextlib
import time

from gateway.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.outlet import Outlet
from gateway.pairs import Target
from gateway.request import LENGTH, Origin, Request
from gateway.round import generate
from gateway.validation import Defaults, admit
from outrider.errors import DRAINING, InvalidArgument, NotFound, Unavailable
from outrider.v1 import gateway_pb2

# Prompts above this are tokenized in a thread: the loop must not stand still for the others' rounds.
_SMALL_PROMPT_BYTES = 4096
_PATIENCE_SECONDS = 1.0
# Seconds before the grace period ends at which clients whose answers still run are told to go on elsewhere.
EXPEL_BEFORE = 1.5


class Gateway:
    """Requests of clients on the fleet's pairs."""

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics, defaults: Defaults, recover_within: float) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._defaults = defaults
        self._recover_within = recover_within
        self.requests: set[Request] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._expelled = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._served = False
        metrics.count_requests = lambda model, phase: sum(
            1 for request in tuple(self.requests) if request.phase == phase and request.model.model == model
        )

    async def admit(self, message: gateway_pb2.GenerateRequest, origin: Origin, outlet: Outlet) -> Request:
        """A checked request, ready to run. Raises OutriderError for one that cannot be served."""
        if self.draining:
            raise _draining()
        target = await self._target_of(message.model)
        self._check_draft_model(message.speculation.draft_model, target.info.model)
        arguments = (message, target.info, target.tokenizer, self._defaults)
        if message.ByteSize() > _SMALL_PROMPT_BYTES and message.WhichOneof("prompt") != "token_ids":
            admitted = await asyncio.to_thread(admit, *arguments)
        else:
            admitted = admit(*arguments)
        if self.draining:  # since then
            raise _draining()
        target.metrics.prompt_tokens.inc(len(admitted.token_ids))
        return Request(admitted, origin, target.info, target.tokenizer, target.metrics, outlet)

    async def run(self, request: Request) -> None:
        """Runs a request to its end, in a task of its own. Raises what the client is told."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.requests.add(request)
        self._idle.clear()
        outcome = "abort"
        try:
            await generate(request, self._fleet, self._recover_within)
            outcome = "length" if request.finish_reason == LENGTH else "stop"
        except asyncio.CancelledError:
            if self._expelled:
                raise _draining() from None
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            self._tasks.discard(task)
            self.requests.discard(request)
            if not self.requests:
                self._idle.set()
            seconds = time.monotonic() - request.origin.arrival
            request.metrics.finished(outcome, seconds, len(request.admitted.token_ids), request.num_delivered)

    def models(self) -> list[gateway_pb2.ListModelsResponse.Model]:
        """The models known, with the drafts that can be used now."""
        return [
            gateway_pb2.ListModelsResponse.Model(
                model=name,
                drafts=dict.fromkeys(d.info.model for target in targets for d in target.drafts if d.available),
                max_sequence_length=min(target.info.max_sequence_length for target in targets),
                draft_shares=[
                    gateway_pb2.ListModelsResponse.DraftShare(
                        draft_model=draft.info.model, percent=draft.percent, available=draft.available
                    )
                    for target in targets
                    for draft in target.drafts
                    if draft.info.model
                ],
            )
            for name, targets in self._fleet.known_models().items()
        ]

    @property
    def serving(self) -> bool:
        """Whether requests can be served.

        At start every draft is tried first, and one that does not fit keeps the gateway from serving: a mistake is
        loud. A draft that turns out not to fit later on is only not used: a roll-out of drafts is free of risk.
        """
        available = self._fleet.available_targets()
        drafts = [draft for target in available for draft in target.drafts]
        if not self._served and not all(draft.tried and not draft.misfit for draft in drafts):
            return False
        self._served = self._served or bool(available)
        return bool(available)

    async def drained(self, grace: float) -> None:
        """Returns once no request runs; those that do not end in time are told UNAVAILABLE, with all they have got."""
        try:
            async with asyncio.timeout(max(grace - EXPEL_BEFORE, 0.0)):
                await self._idle.wait()
        except TimeoutError:
            pass
        finally:  # also where all of the time is over, after the gateway stood still
            self._expelled = True
            for task in self._tasks:
                task.cancel()
        await self._idle.wait()

    async def _target_of(self, model: str) -> Target:
        """A target of the model. Raises NotFound for one that no pair serves, Unavailable while none of its does.

        A target whose session just broke is often back within a moment, so there is a little patience.
        """
        known = self._fleet.known_models()
        if not known:
            problems = "; ".join(f"{target.address}: {target.problem}" for target in self._fleet.targets)
            raise Unavailable(f"no target has served yet: {problems}")
        if not model and len(known) > 1:
            raise InvalidArgument("model", f"expected one of {', '.join(sorted(known))}, found none")
        name = model or next(iter(known))
        if name not in known:
            raise NotFound(f"model: {name!r:.80} is not served here; known are {', '.join(sorted(known))}")
        deadline = time.monotonic() + min(_PATIENCE_SECONDS, self._recover_within)
        while not (available := self._fleet.available_targets(name)) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._fleet.changed().wait()
        if not available:
            problems = "; ".join(f"{target.address}: {target.problem}" for target in known[name])
            raise Unavailable(f"no target serves {name} now: {problems}")
        return min(available, key=lambda target: target.num_sequences)

    def _check_draft_model(self, draft_model: str, model: str) -> None:
        beside = (draft for target in self._fleet.known_models()[model] for draft in target.drafts)
        drafts = {draft.info.model for draft in beside if draft.info.model}
        if draft_model and draft_model not in drafts:
            found = ", ".join(sorted(drafts)) or "none"
            raise NotFound(f"speculation.draft_model: {draft_model!r:.80} is not beside this model; known are {found}")


def _draining() -> Unavailable:
    return Unavailable("the gateway is draining; another one can take the request, or continue it", DRAINING)
