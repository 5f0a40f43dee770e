"""`outrider up`: all three services on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.client import DEFAULT_ADDRESS
from outrider.cli.processes import Pair, PairOptions, ServiceFailed
from outrider.settings import ConfigFile, split_flags

_LONGEST_PAUSE = 10.0  # seconds between two attempts to start the draft again


def up(
    target: Annotated[Path, typer.Option(help="Directory of the target's checkpoint.", exists=True, file_okay=False)],
    draft: Annotated[
        Path | None,
        typer.Option(help="Directory of the draft's checkpoint; without it nothing is drafted.", exists=True),
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the gateway; port 0 picks a free one.")] = DEFAULT_ADDRESS,
    metrics_listen: Annotated[str, typer.Option(help="HOST:PORT of the gateway's /metrics.")] = "127.0.0.1:0",
    target_flags: Annotated[str, typer.Option(help="Further flags for the target, as one string.")] = "",
    draft_flags: Annotated[str, typer.Option(help="Further flags for the draft, as one string.")] = "",
    gateway_flags: Annotated[str, typer.Option(help="Further flags for the gateway, as one string.")] = "",
    config: ConfigFile = None,
) -> None:
    """Serve a pair with all three services on this machine, until Ctrl-C.

    A draft that ends is started again. A target or gateway that ends stops the others, and gives the exit code.
    SIGUSR1 has all of them print their tables.
    """
    options = PairOptions(
        target,
        draft,
        listen,
        metrics_listen,
        split_flags("--target-flags", target_flags),
        split_flags("--draft-flags", draft_flags),
        split_flags("--gateway-flags", gateway_flags),
    )
    try:
        asyncio.run(_run(options))
    except asyncio.CancelledError:
        pass
    except ServiceFailed as failed:
        _say(str(failed))
        raise typer.Exit(failed.exit_code) from None


async def _run(options: PairOptions) -> None:
    """Returns by CancelledError at SIGTERM or Ctrl-C, by ServiceFailed when target or gateway ends."""
    task = asyncio.current_task()
    assert task is not None, "not in a task"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    pair = Pair(options)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, pair.send_signal, signal.SIGUSR1)
    async with pair:
        print(f"outrider up ready grpc={pair.address} metrics={pair['gateway'].metrics}", flush=True)
        _say(f"try: outrider chat --address {pair.address}")
        keeper = asyncio.create_task(_keep_draft(pair)) if options.draft else None
        ends = [asyncio.create_task(pair[name].failed()) for name in ("target", "gateway")]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watchers = [task for task in (keeper, *ends) if task]
            for watcher in watchers:
                watcher.cancel()
            await asyncio.wait(watchers)
        raise done.pop().result()


async def _keep_draft(pair: Pair) -> None:
    """Starts the draft again whenever it ended, with a pause that doubles while it does not become ready."""
    pause = 0.25
    while True:
        _say(f"{await pair['draft'].failed()}; the target goes on without it, and it is started again")
        try:
            await asyncio.sleep(pause)
            await pair.start_draft()
            pause = 0.25
        except ServiceFailed:
            pause = min(2 * pause, _LONGEST_PAUSE)


def _say(text: str) -> None:
    print(f"outrider up: {text}", file=sys.stderr, flush=True)
