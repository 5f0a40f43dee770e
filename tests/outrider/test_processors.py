"""Processors that services keep to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.processors import format_cpuset, keep_to, parse_cpuset
from outrider.server import ServiceFrame
from tests.end_to_end.trio import trio
from tests.gateway.client import Client
from tests.processes import Service


@pytest.fixture
def twelve(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use 0 to 7, and 16 to 19."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(8), *range(16, 20)})


@pytest.mark.usefixtures("twelve")
@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", {0}), ("0-3,16", {0, 1, 2, 3, 16}), ("5-5", {5}), ("7, 1-2,2", {1, 2, 7}), ("0-7,16-19", None)],
)
def test_lists_of_processors(text: str, numbers: set[int] | None) -> None:
    found = parse_cpuset(text)
    assert found == (os.sched_getaffinity(0) if numbers is None else numbers)
    assert parse_cpuset(format_cpuset(found)) == found


def test_lists_are_written_as_linux_does() -> None:
    assert format_cpuset({19, 0, 3, 1, 18, 5}) == "0-1,3,5,18-19"


@pytest.mark.usefixtures("twelve")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "processors such as 0-3,8, found ")
            for text in ("", " ", "0,", "all", "-1", "0-", "1.5", "1-2-3", "²")
        ),
        ("3-1", "ranges from a processor to a later one, found 3-1$"),
        ("8", "processors that this process may use, 0-7,16-19, found 8$"),
        ("6-999999999", "processors that this process may use, 0-7,16-19, found 8$"),
    ],
)
def test_what_is_no_list_of_usable_processors_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^expected {message}"):
        parse_cpuset(text)


def test_a_system_that_keeps_no_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_setaffinity")
    with pytest.raises(ValueError, match=r"^expected a system that keeps threads to processors, such as Linux, found "):
        parse_cpuset("0")


@pytest.mark.parametrize("service", ["target_service", "draft_service", "gateway"])
def test_a_wrong_list_is_a_usage_error_of_its_flag(service: str) -> None:
    needed = {"draft_service": ["--target", "localhost:1"], "gateway": ["--pair", "localhost:1"]}.get(service, [])
    command = [sys.executable, "-m", service, *needed, "--cpuset", "3-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--cpuset" in done.stderr and "found 3-1" in " ".join(done.stderr.replace("│", "").split())


async def test_all_threads_of_services_keep_to_their_processors(tmp_path: Path) -> None:
    one = max(os.sched_getaffinity(0))
    flags = ["--cpuset", str(one)]
    with trio(tmp_path, flags, flags, flags) as services:
        for when in ("once they are ready", "with the threads that a request started"):
            for service in services.services:
                assert len(kept := threads(service)) > 1
                assert set(kept.values()) == {str(one)}, (service.module, when, kept)
            async with Client(services.gateway.address) as client:
                await client.generate("the", k=2, max_new_tokens=4, timeout=150)


def threads(service: Service) -> dict[str, str]:
    """The living threads of a process, and the processors that each may use, as Linux writes them."""
    kept = {}
    for folder in Path(f"/proc/{service.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            lines = (folder / "status").read_text().splitlines()
            kept[folder.name] = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    return kept


def test_a_service_whose_processors_are_gone_serves_on_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(thread: int, processors: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        keep_to({0})
    ServiceFrame("toy", "outrider.v1.GatewayService", "127.0.0.1:0", None, cpuset={0}).become_ready()
    assert capsys.readouterr().out.startswith("outrider toy ready")
    assert "--cpuset: expected processors that it may use, found: Invalid argument" in caplog.text
