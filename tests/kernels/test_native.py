"""How native kernels are built, found again, and done without."""

import ctypes
import logging
from pathlib import Path

import pytest
import torch

from kernels import native
from kernels.linear import linear, pack_weight
from kernels.native import build
from kernels.native.build import BuildError, compiled_library
from tests.kernels.test_attention import Scene


@pytest.fixture(autouse=True)
def environment():
    """The environment is read once in a process; here, once a test and change."""
    native._requested.cache_clear()
    yield
    native._requested.cache_clear()


@pytest.fixture
def untried(monkeypatch):
    """As in a new process: nothing was compiled or loaded yet."""
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_tried", False)


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C compiler (cc) found"), ("false", "failed")]
)
def test_without_a_compiler_pytorch_is_used_and_that_is_said_once(untried, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("OUTRIDER_KERNELS", "auto")
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    with caplog.at_level(logging.WARNING):
        packed = [pack_weight(weight) for _ in range(3)]
    assert all(weight.native is None for weight in packed)
    torch.testing.assert_close(linear(x, packed[0]), x @ weight.T)
    [record] = caplog.records
    assert record.getMessage().startswith("no native kernels, falling back to PyTorch's: ")
    assert reason in record.getMessage()


def test_demanded_kernels_that_cannot_be_built(untried, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("OUTRIDER_KERNELS", "native")
    for _ in range(2):
        with pytest.raises(BuildError):
            native.library()


@pytest.mark.parametrize(("value", "is_native"), [("torch", False), ("native", True), ("auto", True)])
def test_the_switch(monkeypatch, value, is_native):
    monkeypatch.setenv("OUTRIDER_KERNELS", value)
    assert (native.library() is not None) == is_native


def test_an_unknown_form_is_refused(monkeypatch):
    monkeypatch.setenv("OUTRIDER_KERNELS", "fast")
    with pytest.raises(ValueError, match="OUTRIDER_KERNELS: expected one of auto, native, torch, triton, found 'fast'"):
        native.library()


def test_threads_are_shared_with_pytorch():
    runtime = build._openmp_runtime()
    native.library()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line} == {str(runtime)}


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """The kernels without this processor's vector instructions, with panels as on one that has sixteen lanes."""
    folder = tmp_path_factory.mktemp("portable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOUTRIDER_PORTABLE", "-DOUTRIDER_WIDE=16", "-Wno-psabi"))
        path = compiled_library()
        stamp = path.stat().st_mtime_ns
        assert compiled_library() == path, "the second time it is found, not built"
        assert path.stat().st_mtime_ns == stamp
        assert list((folder / "outrider" / "kernels").iterdir()) == [path], "nothing else is left"
        patch.setattr(build, "_FLAGS", ("-no-such-flag",))
        with pytest.raises(BuildError, match=r"failed: .*no-such-flag"):
            compiled_library()
        return native._declare(ctypes.CDLL(str(path)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_portable_form(portable, monkeypatch, dtype):
    monkeypatch.setattr(native, "_library", portable)
    monkeypatch.setattr(native, "_tried", True)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, 64, generator=generator).to(dtype), torch.randn(9, 64, generator=generator).to(dtype)
    packed = pack_weight(weight)
    assert packed.weight.numel() == 64 * 64, "two panels of 32 outputs"
    whole = linear(x, packed, out_dtype=torch.float32)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)
    for count in range(1, 9):
        assert torch.equal(linear(x[:count], packed, out_dtype=torch.float32), whole[:count])
    scene = Scene(dtype)
    rows = scene.rows[::9]
    expected = torch.stack([scene.expected(s, p, window=90) for s, p in rows])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(scene.attend(rows, window=90).double(), expected, rtol=tolerance, atol=tolerance)


def test_no_folder_to_keep_them(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(BuildError, match="no folder to keep the compiled kernels in"):
        compiled_library()
