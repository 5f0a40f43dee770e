"""`python -m deploy.gpt_oss.machine DEVICE FILE`: what the machine has, what is missing, and its bandwidth."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# What services, bench and tests import beside Python's own.
MODULES = (
    *("torch", "triton", "numpy", "grpc", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection"),
    *(
        "grpc_status.rpc_status",
        "google.protobuf",
        "google.rpc.status_pb2",
        "safetensors.torch",
        "tokenizers",
        "jinja2",
    ),
    *("prometheus_client", "typer", "yaml", "tqdm", "uvloop", "transformers"),
    *("pytest", "pytest_asyncio", "pytest_timeout", "xdist", "hypothesis"),
)
_PACKAGES = ("torch", "triton", "grpcio", "protobuf", "transformers", "numpy")


def main() -> int:
    """Writes what was found; 1 where a module is missing."""
    device, path = sys.argv[1], Path(sys.argv[2])
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": len(os.sched_getaffinity(0)),
        "compiler": shutil.which("cc"),
        "missing": _missing(),
        "cards": _cards(),
    }
    path.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1), flush=True)
    import torch

    from kernels.bench.measure import bandwidth
    from outrider.devices import choose_device, use_device

    place = choose_device(device)
    use_device(place)
    found["device"] = torch.cuda.get_device_name(place) if place.type == "cuda" else "main memory"
    found["bandwidth"] = bandwidth(place)
    path.write_text(json.dumps(found, indent=1))
    print(found["device"], found["bandwidth"])
    return int(bool(found["missing"]))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _missing() -> dict[str, str]:
    """Modules that cannot be imported, and why."""
    faults = {}
    for name in MODULES:
        try:
            import_module(name)
        except Exception as error:  # also of versions that do not fit each other
            faults[name] = f"{type(error).__name__}: {error}"
    return faults


def _cards() -> list[str]:
    """Name, memory, driver and clocks of each card, as nvidia-smi has them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "name,memory.total,memory.used,driver_version,clocks.sm,clocks.mem"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
