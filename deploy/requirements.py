"""Used by the Dockerfile: prints what pyproject.toml requires on a device, or checks that what came is for it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

EXTRAS = {"cpu": [], "cuda": ["gpu"]}


def requirements(project: Path, device: str) -> list[str]:
    """The requirements, with the extras that the device needs."""
    table = tomllib.loads(project.read_text())["project"]
    extras = [requirement for extra in EXTRAS[device] for requirement in table["optional-dependencies"][extra]]
    return [*table["dependencies"], *extras]


def main(device: str, *flags: str) -> None:
    """Exits with what is wrong: a device that is neither, or a PyTorch for the other one."""
    if device not in EXTRAS:
        sys.exit(f"DEVICE: expected {' or '.join(EXTRAS)}, found {device!r}")
    if "--check" not in flags:
        print(*requirements(Path("pyproject.toml"), device), sep="\n")
        return
    import torch

    found = "cuda" if torch.version.cuda else "cpu"
    if found != device:
        sys.exit(
            f"expected a PyTorch for {device}, found {torch.__version__} for {found}: PIP_FLAGS name another index"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
