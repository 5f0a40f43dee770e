"""The overlays as kubectl builds them, and their containers' settings as the services' own command lines read them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml

import draft_service.__main__
import gateway.__main__
import target_service.__main__
from outrider.cli.up import up
from outrider.settings import parse_bytes

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
WITH_PAIRS = [name for name in OVERLAYS if name != "single-container"]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which builds the manifests, is not installed"
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

SERVICES = {
    "target": target_service.__main__.main,
    "draft": draft_service.__main__.draft,
    "gateway": gateway.__main__.gateway,
    "up": up,
}


@functools.cache
def build(directory: str) -> tuple[dict[str, Any], ...]:
    """The objects of `deploy/kubernetes/<directory>`."""
    command = ["kubectl", "kustomize", str(KUBERNETES / directory)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert not built.stderr, f"warnings: {built.stderr}"
    return tuple(yaml.safe_load_all(built.stdout))


def objects(overlay: str, kind: str) -> list[dict[str, Any]]:
    """The overlay's objects of a kind."""
    return [found for found in build(f"overlays/{overlay}") if found["kind"] == kind]


def workloads(overlay: str) -> list[dict[str, Any]]:
    """What makes pods."""
    return objects(overlay, "Deployment") + objects(overlay, "StatefulSet")


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    """The specification of a workload's pods."""
    return workload["spec"]["template"]["spec"]


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    """The labels of a workload's pods."""
    return workload["spec"]["template"]["metadata"]["labels"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector, or a Service's plain one, selects pods with these labels."""
    wanted = selector.get("matchLabels", {}) if "matchLabels" in selector or not selector else selector
    return wanted.items() <= labels.items()


def raw_containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod, those of its beginning first."""
    return [*pod.get("initContainers", []), *pod["containers"]]


@dataclass(frozen=True)
class Container:
    """A container of a workload, with what its command line makes of arguments, environment and files."""

    workload: dict[str, Any]
    raw: dict[str, Any]
    service: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The container's."""
        return str(self.raw["name"])

    @property
    def environment(self) -> dict[str, str]:
        """Its variables."""
        return {item["name"]: item["value"] for item in self.raw.get("env", [])}

    @property
    def memory_limit(self) -> int:
        """Bytes."""
        return quantity(self.raw["resources"]["limits"]["memory"])


def containers(overlay: str, tmp_path: Path) -> Iterator[Container]:
    """All services of an overlay; those that `outrider up` runs in one container, too.

    Every mounted path becomes one below `tmp_path` that exists. Raises click's errors for flags that do not.
    """
    for workload in workloads(overlay):
        pod = pod_of(workload)
        for raw in raw_containers(pod):
            roots = _mount(overlay, pod, raw, tmp_path)
            service = raw["command"][1]
            yield Container(workload, raw, service, read_settings(service, raw, raw["args"], roots))
            if service == "up":
                yield from (Container(workload, raw, *child) for child in _children(raw, roots))


def _children(raw: dict[str, Any], roots: dict[str, Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `outrider up` starts: required flags of its own making, then those that it was given."""
    variables = {item["name"]: item["value"] for item in raw["env"]}
    fixed = {
        "target": ["--model", "/weights/target"],
        "draft": ["--model", "/weights/draft/current", "--target", "127.0.0.1:0"],
        "gateway": ["--pair", "127.0.0.1:0=127.0.0.1:0"],
    }
    for service, arguments in fixed.items():
        flags = variables.get(f"OUTRIDER_UP_{service.upper()}_FLAGS", "").split()
        yield service, read_settings(service, raw, arguments + flags, roots)


def read_settings(
    service: str, raw: dict[str, Any], arguments: list[str], roots: dict[str, Path] | None = None
) -> dict[str, Any]:
    """Settings by parameter name, defaults included, as the service's command line reads them."""
    variables = {item["name"]: item["value"] for item in raw.get("env", [])}
    moved = functools.partial(_moved, roots=roots or {})
    environment = {name: moved(value) for name, value in variables.items() if name.startswith("OUTRIDER_")}
    with mock.patch.dict(os.environ, environment, clear=True):
        context = command_of(service).make_context(
            service, [moved(text) for text in arguments], auto_envvar_prefix=f"OUTRIDER_{service.upper()}"
        )
    return context.params


@functools.cache
def command_of(service: str) -> Any:
    """The click command of a service."""
    app = typer.Typer(add_completion=False)
    app.command()(SERVICES[service])
    return typer.main.get_command(app)


def _mount(overlay: str, pod: dict[str, Any], raw: dict[str, Any], tmp_path: Path) -> dict[str, Path]:
    """Folders that stand for what is mounted, with the files of ConfigMaps and of a certificate's Secret."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    data = {found["metadata"]["name"]: found["data"] for found in objects(overlay, "ConfigMap")}
    roots = {}
    for mount in raw.get("volumeMounts", []):
        volume, root = volumes[mount["name"]], tmp_path / raw["name"] / mount["name"]
        root.mkdir(parents=True, exist_ok=True)
        files = data[volume["configMap"]["name"]] if "configMap" in volume else {}
        if "secret" in volume:
            files = dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), "")
        if "persistentVolumeClaim" in volume:
            for link in ("current", "canary"):
                (root / link).mkdir(exist_ok=True)
        for name, text in files.items():
            (root / name).write_text(text)
        roots[mount["mountPath"]] = root
    return roots


def _moved(text: str, roots: dict[str, Path]) -> str:
    """A path below one of the mounts as one below its folder; anything else as it is."""
    for mount, root in roots.items():
        if text == mount or text.startswith(f"{mount}/"):
            return str(root) + text.removeprefix(mount)
    return text


def quantity(text: str) -> int:
    """A Kubernetes quantity of memory in bytes; `12Gi`, `512Mi`, `1000`."""
    return parse_bytes(re.sub(r"i$", "iB", str(text)))
