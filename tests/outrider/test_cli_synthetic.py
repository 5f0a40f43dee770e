"""`outrider bench --synthetic` from end to end, with the model that a CPU can serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from outrider.cli import app

BENCH = [sys.executable, "-m", "outrider", "bench", "--synthetic"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*BENCH, *flags], capture_output=True, text=True, check=False, timeout=280, env=environment)


@pytest.mark.timeout(300)  # six processes start, on a machine that others use, too
def test_one_table_a_file_and_a_picture_and_all_say_synthetic(tmp_path: Path) -> None:
    file, drawing = tmp_path / "bench.json", tmp_path / "bench.svg"
    sizes = ["--requests", "3", "--concurrency", "2", "--random-tokens", "40", "--max-new-tokens", "48"]
    chains = ["--draft-tokens", "0", "--draft-tokens", "3", "--synthetic-acceptance", "2.5"]
    # A draft is never late here, however slow the machine is.
    done = run("tiny-gpt-oss", *sizes, *chains, "--json", str(file), "--picture", str(drawing),
               "--gateway-flags", "--draft-timeout 60")  # fmt: skip
    assert done.returncode == 0, done.stderr
    about, machine, header, _, *rows = done.stdout.splitlines()
    assert about.startswith("synthetic tiny-gpt-oss: random weights") and "mean length 2.5; 40 in, 48 out" in about
    assert "main memory: reads" in machine
    assert header.split()[:6] == ["K", "rounds", "by", "streams", "length", "verify"]
    drivers = [[chain, driver, "2"] for chain in ("0", "3") for driver in ("gateway", "pair")]
    assert [line.split()[:3] for line in rows[:4]] == drivers
    assert [line.split()[3] for line in rows[:2]] == ["1.00", "1.00"]
    assert "synthetic tiny-gpt-oss, rounds by the pair, K = 3: " in done.stderr
    figures = json.loads(file.read_text())
    assert (figures["synthetic"], figures["synthetic_acceptance"]) == ("tiny-gpt-oss", 2.5)
    for row in figures["rows"]:
        assert row["requests"] == 3 and row["tokens"] == 3 * 48
        assert row["verify_over_floor"] == pytest.approx(row["verify"] / row["floor"]["target"]) and row["verify"] > 0
        assert 0 < row["outside_share"] < 1 and row["decode_tokens_per_second"] > 0
    plain, drafted = figures["rows"][:2], figures["rows"][2:]
    assert all(row["draft_over_floor"] is None for row in plain) and all(row["draft_over_floor"] > 0 for row in drafted)
    assert [row["rounds_by"] for row in figures["rows"]] == ["gateway", "pair"] * 2
    # A chain has one or two of its tokens accepted; the last of a request may be cut short.
    assert all(1.5 < row["acceptance"]["length"] < 3 for row in drafted)
    assert "synthetic tiny-gpt-oss" in "".join(ElementTree.parse(drawing).getroot().itertext())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["gpt-2"], "--synthetic: expected one of gpt-oss-120b"),
        (["tiny-gpt-oss", "--target", "."], "expected neither --target nor --prompts"),
        (["tiny-gpt-oss", "--picture", "/nowhere/a.svg"], "--picture: "),
    ],
)
def test_what_makes_no_sense_is_known_at_once(flags: list[str], words: str) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("flag", ["--target-flags", "--draft-flags", "--gateway-flags"])
def test_flags_of_services_are_refused_where_none_is_started(flag: str) -> None:
    done = CliRunner().invoke(app, ["bench", flag, "--cuda-graphs", "--address", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "need --target or --synthetic" in " ".join(done.stderr.replace("│", " ").split())
