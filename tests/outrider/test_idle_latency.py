"""The latency of idle processors that services ask for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import draft_service.__main__
import gateway.__main__
import target_service.__main__
from outrider import idle_latency
from outrider.idle_latency import DEVICE, hold_latency, parse_latency
from outrider.server import ServiceFrame
from tests.end_to_end.trio import trio
from tests.processes import Service
from tests.scripted.cluster import ANY


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in place of the device."""
    file = tmp_path / "latency"
    file.write_bytes(b"")
    monkeypatch.setattr(idle_latency, "DEVICE", file)
    return file


@pytest.mark.parametrize(("text", "number"), [("0", 0), (" 200", 200), ("2147483647", 2**31 - 1)])
def test_a_latency_is_held_as_the_kernel_reads_it(device: Path, text: str, number: int) -> None:
    assert parse_latency(text) == number
    assert device.read_bytes() == b""
    held = hold_latency(number)
    try:
        assert int.from_bytes(device.read_bytes(), sys.byteorder) == number
        assert device.stat().st_size == 4
        assert os.path.samestat(os.fstat(held), device.stat()) and not os.get_inheritable(held)
    finally:
        os.close(held)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("text", ["", "-1", "0.5", "all", "²", "2147483648"])
def test_what_is_no_latency_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^expected microseconds, a whole number from 0 to \d+, found '{text}'$"):
        parse_latency(text)


@pytest.mark.parametrize(
    "command", [target_service.__main__.main, draft_service.__main__.draft, gateway.__main__.gateway]
)
def test_a_device_that_does_not_open_is_a_usage_error_of_its_flag(device: Path, command: Callable[..., None]) -> None:
    device.unlink()
    app = typer.Typer()
    app.command()(command)
    with pytest.raises(typer.BadParameter) as error:
        typer.main.get_command(app).main(["--cpu-dma-latency", "200"], standalone_mode=False)
    assert error.value.exit_code == 2
    assert error.value.format_message().startswith(
        f"Invalid value for '--cpu-dma-latency': expected {device} to open for writing, found: "
        "No such file or directory; without it, set the node's tuned profile latency-performance"
    )
    assert not device.exists()


def test_services_hold_the_device_once_they_are_ready(tmp_path: Path) -> None:
    try:
        parse_latency("200")
    except ValueError as error:
        pytest.skip(str(error))
    flags = ["--cpu-dma-latency", "200"]
    with Service("gateway", *ANY, "--pair", "127.0.0.1:1", *flags, until="127.0.0.1:1") as waiting:
        assert not holds(waiting)
    with trio(tmp_path, flags, flags, flags) as services:
        assert [holds(service) for service in services.services] == [True] * 3
        assert int.from_bytes(DEVICE.open("rb", buffering=0).read(4), sys.byteorder) <= 200


def holds(service: Service) -> bool:
    """Whether a process has the device open."""
    found = set()
    for link in Path(f"/proc/{service.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed
            found.add(link.readlink())
    assert len(found) > 1
    return DEVICE in found


@pytest.mark.parametrize(("driver", "warns"), [("haltpoll\n", False), ("none\n", True), (None, False)])
def test_a_kernel_that_will_not_hear_is_told_of(
    device: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    driver: str | None,
    warns: bool,
) -> None:
    file = tmp_path / "current_driver"
    if driver is not None:
        file.write_text(driver)
    monkeypatch.setattr(idle_latency, "DRIVER", file)
    ServiceFrame("toy", "outrider.v1.GatewayService", "127.0.0.1:0", None, cpu_dma_latency=20).become_ready()
    assert int.from_bytes(device.read_bytes(), sys.byteorder) == 20
    assert ("expected a kernel with an idle driver, found none" in caplog.text) == warns


def test_a_service_whose_device_is_gone_serves_on(
    device: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    device.unlink()
    frame = ServiceFrame("toy", "outrider.v1.GatewayService", "127.0.0.1:0", None, cpu_dma_latency=0)
    frame.become_ready()
    assert capsys.readouterr().out.startswith("outrider toy ready")
    assert "--cpu-dma-latency: expected a device to write, found: " in caplog.text and str(device) in caplog.text
