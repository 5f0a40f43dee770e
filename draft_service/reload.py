"""SIGHUP: what `--model` leads to now is loaded and tried while the old weights serve, and then takes their place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from prometheus_client import Gauge

from draft_service.loading import LoadedDraft, Loader, NamedDraft
from draft_service.self_test import Verdict
from draft_service.target_link import TargetLink
from outrider.errors import FailedPrecondition, OutriderError, one_line
from outrider.v1 import target_pb2

log = logging.getLogger(__name__)

Judge = Callable[[LoadedDraft, target_pb2.GetTargetInfoResponse], Awaitable[Verdict | None]]


@dataclass(frozen=True)
class Candidate:
    """New weights that fit. `verdict` None: not tried."""

    loaded: LoadedDraft
    verdict: Verdict | None = None


class Reload:
    """Brings candidates for as long as it runs. What does not fit is refused, and the old weights go on serving."""

    def __init__(self, loader: Loader, link: TargetLink, judge: Judge, successful: Gauge) -> None:
        self._loader = loader
        self._link = link
        self._judge = judge
        self._successful = successful
        self._hung_up = asyncio.Event()
        self._candidate: Candidate | None = None
        self.accepted = asyncio.Event()
        """Set while a candidate waits to be taken."""
        self._taken = asyncio.Event()
        self._taken.set()

    def hang_up(self) -> None:
        """Asks for what is there now; while that is loaded, once more for what is there afterwards."""
        self._hung_up.set()

    def take(self) -> Candidate | None:
        """The candidate, once."""
        candidate, self._candidate = self._candidate, None
        self.accepted.clear()
        self._taken.set()
        return candidate

    async def run(self) -> None:
        """Follows the signals."""
        while await self._hung_up.wait():
            await self._taken.wait()  # the old weights, those that wait and new ones: memory is there for two
            self._hung_up.clear()
            try:
                draft = await self._loader.inspect()
                log.info("SIGHUP: loading %s from %s", draft.name, draft.inspected.checkpoint.directory)
                self._candidate = await self._load(draft)
            except (ValueError, OSError, OutriderError, grpc.aio.AioRpcError) as error:
                self._successful.set(0)
                log.error("SIGHUP: %s; the old weights go on serving", one_line(error))
            except Exception:  # a bug, which is no reason to stop what serves
                self._successful.set(0)
                log.exception("SIGHUP: the old weights go on serving")
            else:
                self._successful.set(1)
                self._taken.clear()
                self.accepted.set()

    async def _load(self, draft: NamedDraft) -> Candidate:
        """Loads it beside the target as soon as that serves. Raises FailedPrecondition where it is near chance."""
        info = await self._link.info()
        loaded = await self._loader.load(draft, info)
        return Candidate(loaded, await self._try(loaded, info))

    async def _try(self, loaded: LoadedDraft, info: target_pb2.GetTargetInfoResponse) -> Verdict | None:
        """The verdict; where the target was lost before there was one, its successor's. Raises FailedPrecondition."""
        while True:
            verdict = await self._judge(loaded, info)
            if verdict is not None and verdict.fits is False:
                raise FailedPrecondition(f"{loaded.draft.inspected.checkpoint.directory}: {verdict.text}")
            if verdict is None or verdict.fits:
                return verdict
            tried, info = info, await self._link.info()
            if info.instance_id == tried.instance_id:
                return verdict
