"""Compiles the C sources beside this file, once for each processor, compiler and version of the sources."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """The kernels cannot be compiled here."""


def compiled_library() -> Path:
    """Returns the shared library, compiling it if the cache folder has none for these sources and this machine."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise BuildError("no C compiler (cc) found")
    runtime = _openmp_runtime()
    key = hashlib.sha256()
    for part in (compiler, _run([compiler, "--version"]), str(runtime), _processor(), " ".join(_FLAGS)):
        key.update(part.encode() + b"\0")
    for source in sorted(Path(__file__).parent.glob("*.[ch]")):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    failures = []
    for folder in _folders():
        target = folder / f"kernels-{key.hexdigest()[:32]}.so"
        try:
            if target.is_file() and target.stat().st_uid == os.getuid():
                return target
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _compile(compiler, runtime, Path(work) / "kernels.so")
                os.replace(Path(work) / "kernels.so", target)
            return target
        except OSError as error:
            failures.append(str(error))
    raise BuildError(f"no folder to keep the compiled kernels in: {'; '.join(failures)}")


def _compile(compiler: str, runtime: Path | None, output: Path) -> None:
    sources = sorted(Path(__file__).parent.glob("*.c"))
    objects = [output.with_name(f"{source.stem}.o") for source in sources]
    for source, target in zip(sources, objects, strict=True):
        try:
            _run([compiler, "-march=native", *_FLAGS, "-c", str(source), "-o", str(target)], output.parent)
        except BuildError:
            _run([compiler, *_FLAGS, "-c", str(source), "-o", str(target)], output.parent)
    openmp = "-fopenmp" if runtime is None else str(runtime)
    _run([compiler, "-shared", *map(str, objects), openmp, "-lm", "-o", str(output)], output.parent)


def _openmp_runtime() -> Path | None:
    """The OpenMP library that PyTorch has loaded: with another one there would be two pools of threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    found = [Path(path) for path in sorted(paths) if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    return found[0] if found else None


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(wanted))])


def _folders() -> Iterator[Path]:
    """Where the library may lie: the user's cache, where the user has a home at all, and the temporary folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(cache):
        yield Path(cache) / "outrider" / "kernels"
    with suppress(FileNotFoundError):  # no folder that can be written to
        yield Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"


def _run(command: list[str], scratch: Path | None = None) -> str:
    """What a command writes; a compiler keeps its own temporary files in `scratch`."""
    environment = os.environ if scratch is None else {**os.environ, "TMPDIR": str(scratch)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    if result.returncode:
        raise BuildError(f"{' '.join(command[:2])} ... failed: {result.stderr.strip()[:400]}")
    return result.stdout
