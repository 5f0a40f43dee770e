"""The code that the Dockerfile copies, run as a cluster runs it: hostile environment, any user, read-only root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

import draft_service.__main__
import gateway.__main__
import target_service.__main__
from deploy.requirements import requirements
from outrider.cli import app
from tests.drafts import write_tiny_draft
from tests.end_to_end.trio import HOT
from tests.gateway.client import Client
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import ANY, PATIENT, eventually

ROOT = Path(__file__).parents[2]
USER = 10_007_351
# Services that a user may well create, and the ports that they may name.
NAMES = (
    "target",
    "draft",
    "gateway",
    "outrider",
    "outrider-target",
    "outrider-draft",
    "outrider-gateway",
    "outrider-up",
)
PORTS = {"": 7101, "grpc": 7101, "metrics": 9101, "listen": 7102}
INJECTED = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")


def injected(name: str) -> dict[str, str]:
    """What Kubernetes puts into every container of the namespace for a Service."""
    prefix = name.upper().replace("-", "_")
    variables = {f"{prefix}_SERVICE_HOST": "10.0.0.1", f"{prefix}_PORT": "tcp://10.0.0.1:7101"}
    for port_name, port in PORTS.items():
        variables[f"{prefix}_SERVICE_PORT{'_' * bool(port_name)}{port_name.upper()}"] = str(port)
        link = f"{prefix}_PORT_{port}_TCP"
        parts = {"": f"tcp://10.0.0.1:{port}", "_PROTO": "tcp", "_PORT": str(port), "_ADDR": "10.0.0.1"}
        variables |= {link + part: value for part, value in parts.items()}
    return variables


def copied() -> list[str]:
    """What the Dockerfile takes from the repository."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    return [source for line in lines if re.match(r"COPY (?!--from)", line) for source in line.split()[1:-1]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that other users can read, as pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def code(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code as the image has it."""
    sources, installed = tmp_path_factory.mktemp("sources"), folder / "code"
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources)
    install = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(installed), str(sources)]
    subprocess.run([sys.executable, "-m", "pip", "install", *install], check=True)
    return installed


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    write_tiny_llama(folder / "target", num_hidden_layers=3)
    write_tiny_draft(folder / "draft", draft_vocab_size=320)
    return folder


@pytest.fixture(scope="module")
def writable(folder: Path) -> Path:
    """The one folder that a service may write to, beside shared memory."""
    writable = folder / "writable"
    writable.mkdir()
    writable.chmod(0o1777)
    return writable


@pytest.fixture(scope="module")
def prefix(code: Path, writable: Path) -> list[str]:
    """A command line before the service's own: no home, no user of that number, nowhere to write but `writable`.

    Where the tests may not mount, or are not root, they do without what needs it.
    """
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(code), "TMPDIR": str(writable), "OMP_NUM_THREADS": "1"}
    variables |= {key: value for name in NAMES for key, value in injected(name).items()}
    clean = ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
    # The interpreter may lie in root's home: then the user may read everything, and write nothing.
    reader = [*user, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    mounts = f'mount --bind {writable} {writable} && mount -o remount,bind,ro / && cd / && exec "$@"'
    read_only, somewhere = ["unshare", "--mount", "sh", "-c", mounts, "sh"], ["sh", "-c", 'cd / && exec "$@"', "sh"]
    for command in (
        [*read_only, *user, *clean],
        [*read_only, *reader, *clean],
        [*somewhere, *user, *clean],
        [*somewhere, *reader, *clean],
    ):
        if subprocess.run([*command, sys.executable, "-c", ""], capture_output=True, check=False).returncode == 0:
            return command
    if os.getuid() == 0:
        pytest.skip("root here cannot become a user that can still read the interpreter")
    return [*somewhere, *clean]


@pytest.fixture
def services(prefix: list[str], models: Path) -> Iterator[list[Service]]:
    sized = ("--kv-cache", "16MiB")
    with (
        Service("target_service", *ANY, "--model", models / "target", *sized, prefix=prefix) as target,
        Service(
            "draft_service", *ANY, "--model", models / "draft", "--target", target.address, "--no-self-test", *sized,
            prefix=prefix,
        ) as draft,
        Service("gateway", *ANY, *PATIENT, "--pair", f"{target.address}={draft.address}", prefix=prefix) as front,
    ):  # fmt: skip
        eventually(lambda: front.metric("outrider_peer_available") == 2, dump=[target, draft, front])
        yield [target, draft, front]


async def test_services_run_as_any_user_on_a_read_only_root_among_hostile_variables(
    services: list[Service], prefix: list[str], writable: Path
) -> None:
    target, draft, front = services
    case = {"sampling": {**HOT, "seed": 3}, "max_new_tokens": 24, "ignore_eos": True}
    async with Client(front.address) as client:
        plain, drafted = [await client.generate(k=k, **case) for k in (0, 4)]
    assert drafted.text == plain.text and sum(drafted.from_draft) > 3
    assert target.metric("outrider_hidden_state_bytes_total", transport="shared_memory") > 0
    compiled = list(writable.rglob("kernels-*.so"))
    assert len(compiled) == 1, "compiled once, found by the draft"
    if "setpriv" in prefix:
        assert compiled[0].stat().st_uid == USER
        assert all(f"Uid:\t{USER}\t" in status_of(service) for service in services)
    assert [service.stop() for service in (front, draft, target)] == [0, 0, 0]
    assert not any("Traceback" in service.text for service in services)


def status_of(service: Service) -> str:
    return Path(f"/proc/{service.process.pid}/status").read_text()


def test_the_services_under_test_are_those_of_the_image(code: Path, prefix: list[str]) -> None:
    program = "import kernels, gateway, os; print(kernels.__file__, gateway.__file__); open('/left-behind', 'w')"
    done = subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert [Path(path).parents[1] for path in done.stdout.split()] == [code, code]
    assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr


def test_no_setting_has_a_name_that_kubernetes_injects() -> None:
    services = {"target": target_service.__main__.main, "draft": draft_service.__main__.draft,
                "gateway": gateway.__main__.gateway}  # fmt: skip
    found = 0
    for name, function in services.items():
        one = typer.Typer()
        one.command(context_settings={"auto_envvar_prefix": f"OUTRIDER_{name.upper()}"})(function)
        found += _check_names(typer.main.get_command(one), f"OUTRIDER_{name.upper()}")
    for command in typer.main.get_command(app).commands.values():
        found += _check_names(command, "OUTRIDER_UP")
    assert found > 60


def _check_names(command: click.Command, prefix: str) -> int:
    names = [parameter.name.upper() for parameter in command.params if parameter.name]
    variables = [f"{prefix}_{name}" for name in names]
    variables += [parameter.envvar for parameter in command.params if isinstance(parameter.envvar, str)]
    assert not [name for name in variables if INJECTED.search(name)]
    return len(variables)


def test_the_image_gets_what_the_project_requires() -> None:
    cpu, cuda = (requirements(ROOT / "pyproject.toml", device) for device in ("cpu", "cuda"))
    assert any(line.startswith("torch") for line in cpu)
    assert [line.partition(">")[0] for line in cuda if line not in cpu] == ["triton"]


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    ignored, *shown = [
        line for line in (ROOT / ".dockerignore").read_text().split() if line[0] in "*!" and not line.startswith("**")
    ]
    assert ignored == "*" and sorted(line[1:] for line in shown) == sorted(copied())
