"""Runs an overlay's containers as processes of this machine, with their own commands, arguments, variables and files.

What differs from a cluster: ports are free ones, every name of a pod is localhost, weights are tiny, and sizes and
devices that ask for a GPU are taken out.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from outrider.channels import connect, is_serving
from tests.deploy.manifests import labels_of, objects, pod_of, raw_containers, workloads

ROOT = Path(__file__).parents[2]
# Of a large model and its GPU.
_SIZES = re.compile(r"_(DEVICE|KV_CACHE|MAX_SEQUENCE_LENGTH|SHARED_MEMORY|MAX_SEQUENCES)$")
_SMALL = {
    "OUTRIDER_TARGET_DEVICE": "cpu",
    "OUTRIDER_DRAFT_DEVICE": "cpu",
    "OUTRIDER_TARGET_KV_CACHE": "16MiB",
    "OUTRIDER_DRAFT_KV_CACHE": "16MiB",
    "OUTRIDER_DRAFT_SELF_TEST": "false",  # of weights drawn at random
    "OMP_NUM_THREADS": "1",
}


class Run:
    """The pods of an overlay, one of each workload, as far as they were started."""

    def __init__(self, overlay: str, directory: Path, weights: dict[str, Path], secrets: dict[str, Path]) -> None:
        """`weights`: folder of each claim; `secrets`: of each Secret, with tls.crt, tls.key and ca.crt."""
        self._overlay, self._directory = overlay, directory
        self._weights, self._secrets = weights, secrets
        pods = [(labels_of(found)["app.kubernetes.io/component"], pod_of(found)) for found in workloads(overlay)]
        self._pods = {raw["name"]: (component, pod, raw) for component, pod in pods for raw in raw_containers(pod)}
        self._ports = {
            port["containerPort"]: _free_port() for _, _, raw in self._pods.values() for port in raw["ports"]
        } | {7102: _free_port()}
        self._data = {
            found["metadata"]["name"]: {name: self._local(text) for name, text in found["data"].items()}
            for found in objects(overlay, "ConfigMap")
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.output: dict[str, deque[str]] = {}

    def port(self, port: int) -> int:
        """Where what the manifest calls `port` is here."""
        return self._ports[port]

    def folder(self, container: str, mount_path: str) -> Path:
        """What stands here for a container's mounted folder."""
        component, pod, raw = self._pods[container]
        (name,) = [mount["name"] for mount in raw["volumeMounts"] if mount["mountPath"] == mount_path]
        (volume,) = [found for found in pod["volumes"] if found["name"] == name]
        if "persistentVolumeClaim" in volume:
            return self._weights[volume["persistentVolumeClaim"]["claimName"]]
        if "secret" in volume:
            return self._secrets[volume["secret"]["secretName"]]
        if name == "cache":  # where kernels are compiled already
            return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = self._directory / component / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in self._data[volume["configMap"]["name"]].items() if "configMap" in volume else ():
            if not (folder / file).exists():
                (folder / file).write_text(text)
        return folder

    def start(self, container: str) -> None:
        """Starts a container's process and waits as kubelet does, until its startup probe succeeds."""
        _, _, raw = self._pods[container]
        variables = {item["name"]: item["value"] for item in raw["env"] if not _SIZES.search(item["name"])}
        environment = {name: self._here(container, value) for name, value in variables.items()}
        command = [sys.executable, "-m", *raw["command"], *(self._here(container, text) for text in raw["args"])]
        self.output[container] = deque(maxlen=500)
        self.processes[container] = process = subprocess.Popen(
            command,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment, **_SMALL},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=lambda: self.output[container].extend(process.stdout or ()), daemon=True).start()
        deadline = time.monotonic() + 200
        while not self.probe(container, "startup"):
            assert process.poll() is None and time.monotonic() < deadline, f"{container}:\n{self.text(container)}"
            time.sleep(0.1)

    def probe(self, container: str, kind: str) -> bool:
        """Whether a container's probe succeeds."""
        return asyncio.run(self._probe(self._pods[container][2][f"{kind}Probe"]["grpc"]))

    def stop(self, container: str) -> int:
        """SIGTERM, and the exit code."""
        self.processes[container].terminate()
        return self.processes[container].wait(100)

    def kill(self) -> None:
        """Ends what still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def text(self, container: str) -> str:
        """What a container wrote."""
        return "".join(self.output[container])

    async def _probe(self, probe: dict[str, Any]) -> bool:
        async with connect(f"127.0.0.1:{self.port(probe['port'])}") as channel:
            return await is_serving(channel, probe["service"])

    def _here(self, container: str, text: str) -> str:
        """Mounted paths, and what `_local` changes."""
        for mount in self._pods[container][2]["volumeMounts"]:
            path = mount["mountPath"]
            if path != "/dev/shm" and (text == path or text.startswith(f"{path}/")):
                return str(self.folder(container, path)) + text.removeprefix(path)
        return self._local(text)

    def _local(self, text: str) -> str:
        """Ports that are free here, and localhost for the pods' names."""
        text = text.replace("pair-0.pair:", "localhost:")  # the others are not there
        return re.sub(r"(?<=:)(\d{4,5})\b", lambda found: str(self._ports.get(int(found[0]), found[0])), text)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
