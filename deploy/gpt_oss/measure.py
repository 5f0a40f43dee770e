"""`python -m deploy.gpt_oss.measure --out DIR`: all that is to be shown on a card, stage by stage, within a budget.

Each stage is a process with a time limit of its own; one that fails stops none of the later ones. What there is goes
to DIR/measured.json every few seconds and as soon as a stage ends, whole outputs to DIR/log.txt, the table that
docs/performance.md wants to DIR/table.md, and its picture to DIR/roofline.svg. Run again with the same folder it goes
on with what has not succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deploy.gpt_oss.details import details
from deploy.gpt_oss.picture import picture
from deploy.gpt_oss.stages import RESULT, SERVICES, Stage, stages
from deploy.gpt_oss.table import table

ROOT = Path(__file__).parents[2]
MEASURED = "measured.json"
_MODEL_HELP = "gpt-oss-4-layers rehearses everything on a card in a few minutes, tiny-gpt-oss on a CPU"
_EVERY = 5.0  # seconds between two looks at a stage
_GRACE = 20.0  # seconds that an interrupted stage gets to stop its services
_LEAST = 20.0  # seconds that are worth a start
_TAIL, _MOST_LOG = 4000, 2_000_000


def main() -> int:
    """Runs what was asked for; 1 where a stage did not succeed."""
    parser = argparse.ArgumentParser(prog="deploy.gpt_oss.measure", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="gpt-oss-120b", help=_MODEL_HELP)
    parser.add_argument("--device", default="", help="cuda, or cpu where there is none")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these, also where they have succeeded")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all of them")
    for service in SERVICES:
        parser.add_argument(f"--{service}-flags", default="", help=f"further flags of a {service} that serves")
    parser.add_argument("--quick", action="store_true", help="fewer requests, loads and texts")
    parser.add_argument("--list", action="store_true", help="name the stages, and run none")
    options = parser.parse_args()
    cards = _count_cards()
    flags = {service: getattr(options, f"{service}_flags") for service in SERVICES}
    everything = stages(options.model, options.device or ("cuda" if cards else "cpu"), flags, options.quick)
    if unknown := {*options.only, *options.skip} - {stage.name for stage in everything}:
        parser.error(f"no stage is called {', '.join(sorted(unknown))}: see --list")
    if options.list:
        print("\n".join(f"{stage.name:20} {stage.limit:4.0f} s at most  {stage.about}" for stage in everything))
        return 0
    wanted = [stage for stage in everything if stage.name not in options.skip]
    if options.only:
        wanted = [stage for stage in wanted if stage.name in options.only]
    results = Results(options.out, options.model)
    todo = [stage for stage in wanted if stage.name in options.only or not results.succeeded(stage.name)]
    run(todo, results, time.monotonic() + options.budget, cards)
    return int(not all(results.succeeded(stage.name) for stage in todo if stage.cards <= cards))


class Results:
    """The folder, and what it has from an earlier run."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / MEASURED
        self.measured: dict[str, Any] = {"model": model, "stages": {}}
        if self._path.exists():
            self.measured = json.loads(self._path.read_text())
            if self.measured["model"] != model:
                raise SystemExit(f"{self._path}: expected results of {model}, found {self.measured['model']}")

    def succeeded(self, name: str) -> bool:
        """Whether this stage has run to its end."""
        return bool(self.measured["stages"].get(name, {}).get("status") == "ok")

    def put(self, name: str, record: dict[str, Any]) -> None:
        """Keeps what a stage has found so far, and writes the files anew. Nothing replaces no earlier result."""
        held = self.measured["stages"].get(name)
        if held and held["result"] is not None and record["result"] is None:
            return
        self.measured["stages"][name] = record
        _replace(self._path, json.dumps(self.measured, indent=1))
        try:
            _replace(self.folder / "table.md", f"{table(self.measured)}\n\n{details(self.measured)}\n")
            _replace(self.folder / "roofline.svg", picture(self.measured))
        except Exception:  # what was measured is worth more than how it looks
            traceback.print_exc()

    def log(self, name: str, text: str) -> None:
        """Adds a stage's whole output to the log; of a very long one the end."""
        with (self.folder / "log.txt").open("a") as file:
            file.write(f"=== {name}\n{text[-_MOST_LOG:]}\n")


def run(todo: Sequence[Stage], results: Results, deadline: float, cards: int) -> None:
    """Runs stage after stage until the deadline, a time of time.monotonic()."""
    for stage in todo:
        left = deadline - time.monotonic()
        if stage.cards > cards:
            print(f"{stage.name}: not run, {stage.cards} cards are needed and {cards} are here", flush=True)
        elif left < _LEAST:
            print(f"{stage.name}: not run, {max(left, 0):.0f} s are left", flush=True)
        else:
            run_stage(stage, results, min(stage.limit, left - _GRACE / 2))


def run_stage(stage: Stage, results: Results, limit: float) -> None:
    """Runs one, for at most `limit` seconds and the grace that its end takes."""
    with tempfile.TemporaryDirectory() as work:
        result, output = Path(work) / "result.json", Path(work) / "output"
        command = [sys.executable, *(word.replace(RESULT, str(result)) for word in stage.command)]
        environment = {name: value.replace(RESULT, str(result)) for name, value in stage.environment.items()}
        record: dict[str, Any] = {"began": _now(), "command": " ".join(("python", *stage.command)), "limit": limit}
        print(f"{stage.name}: {stage.about}, {limit:.0f} s at most", flush=True)
        began = time.monotonic()

        def keep(status: str) -> None:
            text = output.read_text(errors="replace")
            record["result"] = _read(result, record.get("result"))
            found = {"seconds": time.monotonic() - began, "log": text[-_TAIL:]}
            results.put(stage.name, {**record, **found, "status": status})

        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )
            try:
                status = _wait(process, began + limit, keep)
            finally:
                _stop(process)
        keep(status)
        results.log(stage.name, output.read_text(errors="replace"))
        print(f"{stage.name}: {status} after {time.monotonic() - began:.0f} s", flush=True)
        if status != "ok":
            last = output.read_text(errors="replace").splitlines()[-15:]
            print(textwrap.indent("\n".join(last), "    "), flush=True)


def _wait(process: subprocess.Popen[bytes], deadline: float, keep: Callable[[str], None]) -> str:
    """How the process ended, or `timeout`."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(_EVERY, left))
            return "ok" if code == 0 else f"failed, exit code {code}"
        keep("running")
    return "timeout"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C to a stage that still runs and to what it started, and an end to what does not heed it."""
    for number, grace in ((signal.SIGINT, _GRACE), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)


def _read(path: Path, before: Any) -> Any:
    """What a stage has written; what it had `before` where that is nothing, or half of it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return before


def _replace(path: Path, text: str) -> None:
    """Writes a file in one go: whoever ends this process finds the old one or the new one."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _count_cards() -> int:
    """CUDA devices, asked for in a process of its own: this one must not hold any memory of them."""
    script = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
