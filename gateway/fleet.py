"""All targets with their drafts: who is there, which target a request gets, and pairs that change while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable

from gateway.metrics import GatewayMetrics
from gateway.pairing import DraftShare, Pair
from gateway.pairs import Draft, DraftUse, Target, serves_the_same
from outrider.security import GatewaySecurity
from outrider.v1 import target_pb2

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class Fleet:
    """All targets, by the model that they serve. `configure` says which."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        draft_use: DraftUse,
        security: GatewaySecurity,
        allow_synthetic: bool = False,
    ) -> None:
        """`allow_synthetic`: targets and drafts of random weights, too, for benchmarks.

        Raises OSError or ValueError for a file that TLS or tokens cannot be made of.
        """
        self._to_targets, self._to_drafts = security.towards_target(), security.towards_draft()
        self._metrics = metrics
        self._draft_use = draft_use
        self._allow_synthetic = allow_synthetic
        self._changed = asyncio.Event()
        self.targets: list[Target] = []
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of all targets."""
        return [draft for target in self.targets for draft in target.drafts]

    @property
    def pairs(self) -> list[Pair]:
        """As configured."""
        return [
            Pair(target.address, tuple(DraftShare(draft.address, draft.percent) for draft in target.drafts))
            for target in self.targets
        ]

    def configure(self, pairs: Iterable[Pair]) -> None:
        """Takes up what is new, gives running services their new weights, and lets go of what is not named any more.

        Requests leave a target that goes as they leave one that drains, and a draft at once: it is only a draft.
        Raises ValueError, with nothing changed, for an address that a token would reach in the clear.
        """
        pairs = list(pairs)
        for pair in pairs:
            self._to_targets.check(pair.target)
            for share in pair.drafts:
                self._to_drafts.check(share.address)
        known = {target.address: target for target in self.targets}
        self.targets = [self._target(known.pop(pair.target, None), pair) for pair in pairs]
        for target in known.values():
            self._let_go(target)
        self._change()

    async def stop(self) -> None:
        """Lets go of all services."""
        leaving = [*self._leaving]
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, *(target.stop_all() for target in self.targets), return_exceptions=True)

    def changed(self) -> asyncio.Event:
        """Set at the next change of any service."""
        return self._changed

    def available_targets(self, model: str = "") -> list[Target]:
        """The targets that serve now, of one model or of all."""
        return [target for target in self.targets if target.available and model in ("", target.info.model)]

    def choose_target(
        self, model: target_pb2.GetTargetInfoResponse, avoid: Collection[Target] = (), draft_model: str = ""
    ) -> Target | None:
        """The least busy target that can carry on what began on a target of this model.

        Where a draft is asked for by name, those that have it go first.
        """
        return min(
            (
                target
                for target in self.available_targets(model.model)
                if target not in avoid and serves_the_same(target.info, model)
            ),
            key=lambda target: (bool(draft_model) and not target.has_draft(draft_model), target.num_sequences),
            default=None,
        )

    def known_models(self) -> dict[str, list[Target]]:
        """Targets by model, also those that do not serve just now."""
        models: dict[str, list[Target]] = {}
        for target in self.targets:
            if target.known.is_set():
                models.setdefault(target.info.model, []).append(target)
        return models

    def _target(self, target: Target | None, pair: Pair) -> Target:
        """The target of a pair, with the pair's drafts and no others."""
        if target is None:
            target = Target(
                pair.target, self._to_targets, self._metrics, self._draft_use, self._change, self._allow_synthetic
            )
            target.start()
        known = {draft.address: draft for draft in target.drafts}
        target.drafts = [self._draft(known.pop(share.address, None), share, target) for share in pair.drafts]
        for draft in known.values():
            draft.retire()
            self._when_done(draft.stop())
        return target

    def _draft(self, draft: Draft | None, share: DraftShare, target: Target) -> Draft:
        if draft is None:
            draft = Draft(share, self._to_drafts, target, self._draft_use, self._change, self._allow_synthetic)
            draft.start()
        draft.percent = share.percent
        return draft

    def _let_go(self, target: Target) -> None:
        """Stops a target once no request is on it: they move where another serves the same."""
        log.info("target %s leaves with %d sequences", target.address, target.num_sequences)
        target.retire()

        async def leave() -> None:
            try:
                while target.num_sequences:
                    await asyncio.sleep(_POLL_SECONDS)
            finally:
                await target.stop_all()

        self._when_done(leave())

    def _when_done(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
