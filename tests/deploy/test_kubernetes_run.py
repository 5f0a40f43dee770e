"""The containers of the overlays, run as processes: they start in order, answer probes, serve, reload and drain."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, Secrets
from tests.deploy.manifests import KUBERNETES, needs_kubectl, objects
from tests.deploy.pod_run import ROOT, Run
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama
from tests.scripted.cluster import eventually

pytestmark = needs_kubectl


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, Path]:
    """The two claims, as docs/kubernetes.md has them filled."""
    target, drafts = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafts")
    write_tiny_llama(target, num_hidden_layers=3)
    for version in ("v1", "v2"):
        write_tiny_draft(drafts / version, draft_vocab_size=320)
    for link in ("current", "canary"):
        (drafts / link).symlink_to("v1")
    return {"target-weights": target, "draft-weights": drafts}


def certificates(overlay: str, directory: Path) -> dict[str, Path]:
    """What cert-manager makes of the overlay's Certificates: a folder for each Secret, all of one authority."""
    authority = Authority()
    names = [found["spec"]["secretName"] for found in objects(overlay, "Certificate")]
    return {name: Secrets(directory / name, authority).certificate.parent for name in names}


@contextlib.contextmanager
def running(overlay: str, directory: Path, weights: dict[str, Path], *containers: str) -> Iterator[Run]:
    run = Run(overlay, directory, weights, certificates(overlay, directory))
    try:
        for container in containers:
            run.start(container)
        yield run
    except BaseException:
        for container in run.output:
            print(f"--- {container}\n{run.text(container)}")
        raise
    finally:
        run.kill()


def ask(run: Run, *flags: str) -> str:
    """What a client at the front gets."""
    asked = subprocess.run(
        [sys.executable, "-m", "outrider", "generate", "abc", "--raw", "--max-new-tokens", "8", "--stats", *flags],
        env={**os.environ, "OUTRIDER_ADDRESS": f"dns:///localhost:{run.port(50050)}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert asked.returncode == 0, asked.stderr
    return asked.stdout + asked.stderr


def metrics(run: Run, port: int) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{run.port(port)}/metrics", timeout=60).read().decode()


def available(run: Run) -> int:
    """How many services the gateway can use."""
    lines = metrics(run, 9090).splitlines()
    return sum(line.startswith("outrider_peer_available{") and line.endswith(" 1.0") for line in lines)


def ready(run: Run, *containers: str) -> bool:
    return all(run.probe(container, kind) for container in containers for kind in ("readiness", "liveness"))


def test_the_demo_starts_serves_and_drains(tmp_path, weights):
    containers = ("target", "draft", "gateway")
    with running("cpu-demo", tmp_path, weights, *containers) as run:
        eventually(lambda: ready(run, *containers) and available(run) == 2)
        assert "acceptance" in ask(run, "--draft-tokens", "2")
        # As kubelet ends them: the draft first, then the target.
        assert [run.stop(container) for container in ("draft", "target", "gateway")] == [0, 0, 0]


def shares(run: Run) -> dict[str, float]:
    """The share of requests of each draft of pair-0, by the port that it has here."""
    found = re.findall(r'outrider_draft_share\{address="localhost:(\d+)".* (\S+)', metrics(run, 9090))
    return {port: float(share) for port, share in found}


def roll_a_draft_out(run: Run, versions: Path) -> None:
    """As docs/kubernetes.md has it: the canary reads v2 and gets a share, and the target never knows."""
    instance = re.search(r"attached to target instance (\w+)", run.text("draft-canary"))
    canary, script = str(run.port(7103)), run.folder("draft-canary", "/scripts") / "reload-draft.sh"
    (versions / "canary").unlink()
    (versions / "canary").symlink_to("v2")
    subprocess.run(["sh", str(script), canary], check=True)
    eventually(lambda: 'draft_model="v2"' in metrics(run, 9103))
    assert instance
    eventually(lambda: run.text("draft-canary").count(instance[0]) == 2)  # attached anew, to the same target
    assert "SIGHUP" not in run.text("draft"), "the other draft has nothing to do with it"

    assert shares(run)[canary] == 0
    pairs = run.folder("gateway", "/etc/outrider") / "gateway.yaml"
    pairs.write_text(pairs.read_text().replace(":0%", ":10%"))
    run.processes["gateway"].send_signal(signal.SIGHUP)
    eventually(lambda: shares(run)[canary] == 0.1)
    assert run.processes["target"].poll() is None


def test_a_pair_of_many_speaks_mutual_tls_and_gets_a_new_draft(tmp_path, weights):
    """The pod of pair-0; the other pairs are not there, as with KEDA."""
    with running("many", tmp_path, weights, "target", "draft", "draft-canary", "gateway") as run:
        eventually(lambda: ready(run, "target", "draft", "gateway") and available(run) == 3)
        tls = tmp_path / "client-certificate"
        identity = ["--ssl-certfile", f"{tls}/tls.crt", "--ssl-keyfile", f"{tls}/tls.key"]
        ask(run, "--peer-ca-certs", f"{tls}/ca.crt", *identity)
        with pytest.raises(AssertionError, match="UNAVAILABLE"):
            ask(run, "--peer-ca-certs", f"{tls}/ca.crt")
        roll_a_draft_out(run, weights["draft-weights"])


def test_the_script_that_reloads_says_when_there_is_no_such_draft(tmp_path):
    script = KUBERNETES / "base" / "common" / "reload-draft.sh"
    assert subprocess.run(["sh", str(script), "1"], check=False).returncode == 1


def test_one_container_runs_all_three(tmp_path, weights):
    with running("single-container", tmp_path, weights, "outrider") as run:
        eventually(lambda: ready(run, "outrider") and available(run) == 2)
        ask(run)
        assert all("outrider_build_info" in metrics(run, port) for port in (9090, 9101, 9102))
        assert run.stop("outrider") == 0
