"""Commands that start the services themselves, with tiny real checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama
from tests.scripted.cluster import eventually

ROOT = Path(__file__).parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_tiny_llama(folder / "target"), write_tiny_draft(folder / "draft")


class Up:
    """`outrider up` on the pair, ready. Its two outputs are kept as they come."""

    def __init__(self, target: Path, draft: Path) -> None:
        flags = ["--target", str(target), "--draft", str(draft), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider", "up", *flags, "--target-flags", "--kv-cache 64MiB"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ONE_THREAD,
        )
        self.errors = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        ready = re.match(r"outrider up ready grpc=(\S+) metrics=\S+\n", self.process.stdout.readline())
        assert ready, self.errors
        self.address = ready[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def child(self, module: str) -> int:
        """The process id of the child that runs this module; 0 without one."""
        return next((process for process, name in children(self.process.pid) if name == module), 0)

    def kill(self, module: str) -> int:
        """Kills the child that runs this module, and returns which process that was."""
        process = self.child(module)
        assert process, f"{module} is not running: {self.errors}"
        os.kill(process, signal.SIGKILL)
        return process

    def generate(self) -> subprocess.CompletedProcess[str]:
        prompt = ["the", "--temperature", "0", "--max-new-tokens", "16", "--ignore-eos", "--stats"]
        return subprocess.run(
            [sys.executable, "-m", "outrider", "generate", *prompt, "--address", self.address],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def wait(self) -> int:
        code = self.process.wait(200)
        self._reader.join(60)
        return code


@pytest.fixture
def up(pair: tuple[Path, Path]) -> Iterator[Up]:
    running = Up(*pair)
    try:
        yield running
    finally:
        services = [process for process, _ in children(running.process.pid)]
        running.process.kill()
        running.process.wait()
        # The services end with their parent, even when it is killed.
        eventually(lambda: not any(map(is_running, services)))


def children(parent: int) -> Iterator[tuple[int, str]]:
    """Living children of a process: their ids, and the modules that they run."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            arguments = (status.parent / "cmdline").read_text().split("\0")
        except OSError:  # ended meanwhile
            continue
        if f"PPid:\t{parent}\n" in text and "State:\tZ" not in text and "-m" in arguments:
            yield int(status.parent.name), arguments[arguments.index("-m") + 1]


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_up_serves_has_all_print_their_tables_and_starts_a_lost_draft_again(up: Up) -> None:
    up.process.send_signal(signal.SIGUSR1)
    eventually(lambda: all(f"--- outrider {name}" in up.errors for name in ("target", "draft", "gateway")))
    eventually(lambda: "acceptance length" in up.generate().stderr)
    before = up.generate()
    assert before.returncode == 0, before.stderr
    lost = up.kill("draft_service")
    alone = up.generate()
    assert alone.stdout == before.stdout
    eventually(lambda: up.child("draft_service") not in (0, lost))
    eventually(lambda: "acceptance length" in up.generate().stderr)
    assert "the draft ended by itself (SIGKILL)" in up.errors
    services = [process for process, _ in children(up.process.pid)]
    assert len(services) == 3
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 0
    assert not any(map(is_running, services))


def test_up_ends_with_its_target(up: Up) -> None:
    up.kill("target_service")
    assert up.wait() == 128 + signal.SIGKILL
    assert "the target ended by itself (SIGKILL)" in up.errors


def test_up_says_why_a_service_did_not_start(pair: tuple[Path, Path]) -> None:
    target, _ = pair
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "up", "--target", str(target), "--draft", str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=ONE_THREAD,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "outrider up: the draft ended by itself (exit code 1)" in done.stderr


def test_folders_of_the_working_directory_hide_no_service(tmp_path: Path) -> None:
    """As beside a clone, which is a folder called outrider."""
    for name in ("outrider", "target_service"):
        (tmp_path / name).mkdir()
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from outrider.cli import main; main()"
    command = [sys.executable, "-P", "-c", script, "up", "--target", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=ONE_THREAD, cwd=tmp_path)
    assert f"outrider target: {tmp_path}/config.json: file not found" in done.stderr


def test_up_ends_when_the_target_is_lost_while_the_draft_starts(pair: tuple[Path, Path]) -> None:
    """The draft would wait for its target for ever."""
    target, draft = pair
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "up", "--target", str(target), "--draft", str(draft)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    running: dict[str, int] = {}
    while "draft_service" not in running:
        running = {module: child for child, module in children(process.pid)}
        time.sleep(0.01)
    os.kill(running["target_service"], signal.SIGKILL)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGKILL
    assert "the target ended by itself (SIGKILL)" in errors
    assert not is_running(running["draft_service"])


def test_bench_takes_the_rounds_of_a_pair_apart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    file = tmp_path / "bench.json"
    chains = ["--draft-tokens", "0", "--draft-tokens", "2"]
    sizes = ["--requests", "1", "--max-new-tokens", "12", "--target-flags", "--kv-cache 64MiB --grace 9"]
    sizes += ["--gateway-flags", "--draft-timeout 5"]
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "outrider",
            "bench",
            "--target",
            str(target),
            "--draft",
            str(draft),
            "--transformers",
            *chains,
            *sizes,
            "--json",
            str(file),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    about, header, _, reference, plain, drafted, best, _, _, stages, _, *clocks = done.stdout.splitlines()
    assert (
        about.endswith("threads: target 1, draft 1, transformers 1")
        and header.split()[0] == "K"
        and best.startswith("best K: ")
    )
    assert [line.split()[0] for line in (reference, plain, drafted)] == ["transformers", "0", "2"]
    assert stages.split() == ["K", "queue", "verify", "draft", "transport", "gateway"]
    assert [line.split()[0] for line in clocks] == ["0", "2"]
    figures = json.loads(file.read_text())
    assert figures["transformers_tokens_per_second"] > 0
    assert [load["draft_tokens"] for load in figures["loads"]] == [0, 2]
    for chain in ("0", "2"):
        parts = figures["rounds"][chain]
        assert 0 < parts["target_step"] < time.monotonic() - began
        assert parts["outside"] == pytest.approx(parts["wall"] - parts["target_step"] - parts["draft_step"])
    without, stages = figures["rounds"]["0"]["stages"], figures["rounds"]["2"]["stages"]
    assert without["draft"] == 0 < min(without["verify"], without["transport"], without["gateway"], stages["draft"])
    assert figures["rounds"]["0"]["draft_step"] == 0 < figures["rounds"]["2"]["draft_step"]
