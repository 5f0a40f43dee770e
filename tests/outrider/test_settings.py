import os
import subprocess
import sys

import pytest

from outrider.memory import check_fits
from outrider.settings import parse_bytes, parse_memory, read_options

SCRIPT = """
from typing import Annotated
from outrider.memory import check_fits
from outrider.settings import ConfigFile, LogLevel, run_command
def command(
    config: ConfigFile = None,
    kv_cache: str = "1GiB",
    max_sequences: int = 4,
    pair: list[str] = [],
    log_level: LogLevel = "info",
) -> None:
    print(kv_cache, max_sequences, *pair)
run_command(command, "toy")
"""


def run(*flags, **environment):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *flags], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_flags_beat_the_environment_which_beats_the_file(tmp_path):
    file = tmp_path / "toy.yaml"
    file.write_text("kv-cache: 2GiB\nmax_sequences: 7\n")
    assert run().stdout.split() == ["1GiB", "4"]
    assert run("--config", str(file)).stdout.split() == ["2GiB", "7"]
    assert run("--config", str(file), OUTRIDER_TOY_KV_CACHE="3GiB").stdout.split() == ["3GiB", "7"]
    assert run("--config", str(file), "--kv-cache", "4GiB", OUTRIDER_TOY_KV_CACHE="3GiB").stdout.split() == [
        "4GiB",
        "7",
    ]


@pytest.mark.parametrize(("text", "pairs"), [("pair: a:1=b:2", ["a:1=b:2"]), ("pair: [a:1, b:2]", ["a:1", "b:2"])])
def test_an_option_that_may_be_repeated_is_one_value_or_a_list(tmp_path, text, pairs):
    file = tmp_path / "toy.yaml"
    file.write_text(text)
    assert run("--config", str(file)).stdout.split()[2:] == pairs


def test_an_unknown_key_of_the_file_is_refused_by_name(tmp_path):
    file = tmp_path / "toy.yaml"
    file.write_text("kv_cach: 2GiB\n")
    result = run("--config", str(file))
    assert result.returncode == 2
    assert "unknown option kv-cach; known are" in " ".join(result.stderr.replace("│", "").split())


def test_a_file_that_is_not_there_is_named_once(tmp_path):
    result = run("--config", "nowhere.yaml")
    assert result.returncode == 2
    assert result.stderr.count("nowhere.yaml") == 1


def test_an_unknown_log_level_is_an_error_of_its_flag():
    result = run("--log-level", "loud")
    assert result.returncode == 2
    assert "--log-level" in result.stderr
    assert "'loud'" in result.stderr


def test_help_shows_a_name_of_a_variable_whole_on_a_narrow_terminal():
    text = " ".join(run("--help", COLUMNS="60").stdout.split())
    assert "--kv-cache is OUTRIDER_TOY_KV_CACHE" in text
    assert text.count("OUTRIDER_TOY") == 1
    assert "…" not in text


def test_help_of_a_command_whose_names_are_single_words():
    script = "from outrider.settings import run_command as run\ndef toy(size: int = 1) -> None: ...\nrun(toy, 'toy')"
    done = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, text=True)
    assert "--size is OUTRIDER_TOY_SIZE" in " ".join(done.stdout.split()), done.stderr


def test_what_kubernetes_injects_changes_nothing():
    injected = {"OUTRIDER_TOY_PORT": "tcp://10.0.0.1:50051", "OUTRIDER_TOY_SERVICE_HOST": "10.0.0.1"}
    assert run(**injected).stdout.split() == ["1GiB", "4"]


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("4GB", 4 * 10**9), ("1000", 1000), ("0.5 KiB", 512)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "abc", "4QB", "-"])
def test_a_bad_size_is_named(text):
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "found"), [("kv-cache: 2026-13-45", "month must be in"), ("[" * 3000, "recursion depth")]
)
def test_a_value_that_yaml_cannot_make_is_an_error_of_its_file(tmp_path, text, found):
    file = tmp_path / "toy.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{file}: .*{found}"):
        read_options(file, {"kv_cache"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.25", 250), ("0.999", 999), ("1", 1), ("300", 300), ("2e3", 2000), ("1kB", 1000), ("4KiB", 4096)],
)
def test_a_share_is_of_all_the_memory_there_is(text, size):
    assert parse_memory(text, total=1000) == size


@pytest.mark.parametrize("text", ["0", "-0.5", "nan", "inf", "much", "0.5GiBs"])
def test_memory_that_makes_no_sense_is_refused_by_the_flag(text):
    with pytest.raises(ValueError, match="--kv-cache: expected a size such as 512MiB"):
        parse_memory(text, 1000, "--kv-cache")


def test_a_cache_that_does_not_fit_beside_the_weights_is_refused():
    check_fits("--kv-cache", 40, 60, 100)
    with pytest.raises(
        ValueError, match=r"--kv-cache: a cache of 24.0 GB beside 66.0 GB of weights does not fit into 80"
    ):
        check_fits("--kv-cache", 24 * 10**9, 66 * 10**9, 80 * 10**9)
