"""The two commands that profile a service's step, as a user starts them."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["target", "draft"])
def test_every_variant_is_in_the_file(tmp_path, service):
    path = tmp_path / "profile.json"
    flags = ["--synthetic", "tiny-gpt-oss", "--device", "cpu", "--context", "70", "--steps", "2", "--json", path]
    flags += ["--sequences", "1,2", "--chains", "1,3", *(["--boundaries", "1,2"] if service == "target" else [])]
    command = [sys.executable, "-m", f"{service}_service.step_profile", *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    chains = [v for v in json.loads(path.read_text())["variants"] if "chain" in v]
    assert [(v["sequences"], v["chain"]) for v in chains] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(v["seconds"] > 0 for v in chains)
    assert len(result.stdout.splitlines()) == len(json.loads(path.read_text())["variants"])
