"""The real commands as processes, against a real gateway before scripted services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from tests.scripted.cluster import PATIENT, Cluster, eventually, scripted_cluster

PROMPT = "what comes next"
GREEDY = ("--temperature", "0", "--max-new-tokens", "40", "--ignore-eos")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with scripted_cluster([[]], [[]], ["--draft-tokens", "4", *PATIENT]) as running:
        yield running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outrider", *arguments]


def outrider(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(command(*arguments), input=text, capture_output=True, text=True, timeout=200, check=False)


def answer_of(cluster: Cluster, **prompt: object) -> str:
    """What the gateway answers to the prompt, asked directly, with GREEDY's parameters and no draft."""
    request = gateway_pb2.GenerateRequest(
        sampling={"temperature": 0.0}, max_new_tokens=40, ignore_eos=True, speculation={"max_draft_tokens": 0}, **prompt
    )
    with grpc.insecure_channel(cluster.gateway.address) as channel:
        return "".join(piece.text for piece in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request))


def conversation(*turns: tuple[str, str]) -> gateway_pb2.Conversation:
    return gateway_pb2.Conversation(messages=[{"role": role, "content": content} for role, content in turns])


def test_generate_prints_the_answer_to_a_conversation(cluster: Cluster) -> None:
    expected = answer_of(cluster, conversation=conversation(("system", "be brief"), ("user", PROMPT)))
    done = outrider("generate", PROMPT, "--system", "be brief", "--address", cluster.gateway.address, *GREEDY)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_generate_raw_continues_the_text_of_standard_input(cluster: Cluster) -> None:
    done = outrider("generate", "-", "--raw", "--address", cluster.gateway.address, *GREEDY, text="ab cd")
    assert (done.returncode, done.stdout) == (0, answer_of(cluster, text="ab cd") + "\n")


def test_the_next_gateway_answers_where_the_first_does_not(cluster: Cluster) -> None:
    addresses = f"127.0.0.1:1,{cluster.gateway.address}"
    done = outrider("generate", "ab cd", "--raw", "--address", addresses, *GREEDY)
    assert (done.returncode, done.stdout) == (0, answer_of(cluster, text="ab cd") + "\n")


def test_statistics_go_to_standard_error(cluster: Cluster) -> None:
    done = outrider("generate", PROMPT, "--stats", "--address", cluster.gateway.address, *GREEDY)
    speed, acceptance, positions = done.stderr.splitlines()
    assert speed.startswith("40 tokens after") and "tok/s" in speed and "ended by length" in speed
    assert acceptance.startswith("acceptance length ") and "rounds" in acceptance
    assert positions.startswith("accepted by position: 1: ") and "4: " in positions


def test_without_a_draft_the_statistics_say_so(cluster: Cluster) -> None:
    done = outrider("generate", PROMPT, "--stats", "--draft-tokens", "0", "--address", cluster.gateway.address, *GREEDY)
    assert done.stderr.splitlines()[1] == "nothing drafted; 39 steps"


def test_marked_drafts_are_the_answer_with_brackets(cluster: Cluster) -> None:
    expected = answer_of(cluster, conversation=conversation(("user", PROMPT)))
    done = outrider("generate", PROMPT, "--show-drafts", "--address", cluster.gateway.address, *GREEDY)
    assert done.stdout.replace("[", "").replace("]", "") == expected + "\n"
    assert "[" in done.stdout and not done.stdout.startswith("[")  # the first token is the target's own


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--temperature", "-1"], "INVALID_ARGUMENT", "sampling.temperature"),
        (["--stop-token-id", "999999"], "INVALID_ARGUMENT", "stop_token_ids"),
        (["--model", "other"], "NOT_FOUND", "other"),
        (["--address", "127.0.0.1:1"], "UNAVAILABLE", "127.0.0.1:1"),
        (["--address", "127.0.0.1:1"], "UNAVAILABLE", "`outrider up` starts a gateway"),
    ],
)
def test_an_error_is_one_line_that_names_code_and_field(
    cluster: Cluster, arguments: list[str], code: str, named: str
) -> None:
    done = outrider("generate", PROMPT, "--address", cluster.gateway.address, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"outrider: {code}: ") and named in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_conversation_carries_its_turns_and_survives_an_error(cluster: Cluster) -> None:
    first = answer_of(cluster, conversation=conversation(("user", "one")))
    second = answer_of(cluster, conversation=conversation(("user", "one"), ("assistant", first), ("user", "two")))
    anew = answer_of(cluster, conversation=conversation(("user", "three")))
    done = outrider("chat", "--address", cluster.gateway.address, *GREEDY, text="one\ntwo\n/reset\nthree\n")
    assert (done.returncode, done.stdout) == (0, f"{first}\n{second}\n{anew}\n\n")
    refused = outrider("chat", "--address", cluster.gateway.address, "--temperature", "-1", text="one\ntwo\n")
    assert refused.returncode == 0
    assert refused.stderr.count("INVALID_ARGUMENT") == 2


@pytest.fixture(scope="module")
def slow() -> Iterator[Cluster]:
    """So slow that a command is still at work when something happens to it."""
    with scripted_cluster([["--delay", "0.05"]], [[]]) as running:
        yield running


def test_ctrl_c_cancels_the_request_everywhere(slow: Cluster) -> None:
    process = subprocess.Popen(
        command("generate", PROMPT, "--address", slow.gateway.address, "--max-new-tokens", "4000", "--ignore-eos"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (130, b"")
    eventually(lambda: slow.targets[0].metric("outrider_num_sequences") == 0)


@pytest.mark.parametrize("arguments", [("generate", PROMPT), ("chat",)])
def test_a_reader_that_leaves_ends_the_command(slow: Cluster, arguments: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        command(*arguments, "--address", slow.gateway.address, "--max-new-tokens", "4000", "--ignore-eos"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.stdout.close()  # as head does
    assert (process.wait(timeout=200), process.stderr.read()) == (141, b"")
    eventually(lambda: slow.targets[0].metric("outrider_num_sequences") == 0)


def test_bench_compares_with_no_draft(cluster: Cluster, tmp_path) -> None:
    file = tmp_path / "bench.json"
    load = ("--requests", "6", "--concurrency", "3", "--random-tokens", "9", "--random-vocabulary", "300")
    done = outrider("bench", "--address", cluster.gateway.address, "--max-new-tokens", "30", *load, "--json", str(file))
    assert done.returncode == 0, done.stderr
    header, _, plain, drafted = done.stdout.splitlines()
    assert header.split()[:3] == ["K", "requests", "tok/s"]
    assert plain.split()[:2] == ["0", "6"] and drafted.split()[:2] == ["default", "6"]
    figures = json.loads(file.read_text())
    assert figures["cores"] >= 1 and figures["date"].endswith("UTC")
    without, with_draft = figures["loads"]
    assert without["tokens"] == with_draft["tokens"] > 0
    assert without["acceptance"]["drafted"] == 0 and with_draft["acceptance"]["length"] > 1
    assert with_draft["time_to_first_token"]["p99"] > 0


def test_bench_knows_at_once_where_it_cannot_write(tmp_path) -> None:
    done = outrider("bench", "--address", "127.0.0.1:1", "--json", str(tmp_path / "missing" / "bench.json"))
    assert done.returncode == 2 and "--json" in done.stderr and "UNAVAILABLE" not in done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["\udcff"], "PROMPT"),
        (["-"], "PROMPT"),
        (["x", "--stop", "\udcff"], "--stop"),
        (["x", "--model", "\udcff"], "--model"),
    ],
)
def test_what_is_no_text_is_refused_by_name(arguments: list[str], name: str, locale: str) -> None:
    environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0"}
    done = subprocess.run(
        command("generate", *arguments), input=b"\xff", capture_output=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 2
    assert f"{name}: expected UTF-8".encode() in done.stderr and b"Traceback" not in done.stderr


def test_a_conversation_goes_on_after_a_line_that_is_no_text(cluster: Cluster) -> None:
    done = subprocess.run(
        command("chat", "--address", cluster.gateway.address, *GREEDY),
        input=b"\xff\none\n",
        capture_output=True,
        timeout=200,
        check=False,
    )
    expected = answer_of(cluster, conversation=conversation(("user", "one")))
    assert (done.returncode, done.stdout.decode()) == (0, f"{expected}\n\n")
    assert done.stderr.startswith(b"outrider: message: expected UTF-8") and done.stderr.count(b"\n") == 1


def test_any_locale_and_any_terminal_will_do(cluster: Cluster) -> None:
    """The bytes of the arguments are UTF-8 whatever the locale is; what cannot be shown is a question mark."""
    expected = answer_of(cluster, text="é😀")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        command("generate", "é😀", "--raw", "--address", cluster.gateway.address, *GREEDY),
        capture_output=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (expected + "\n").encode("ascii", "replace") and b"?" in done.stdout


def test_bench_refuses_an_empty_file_of_prompts(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.touch()
    done = outrider("bench", "--prompts", str(file))
    assert done.returncode == 2 and "expected one prompt a line" in done.stderr


def test_a_system_message_has_no_place_in_raw_text() -> None:
    done = outrider("generate", "hello", "--raw", "--system", "Be brief.")
    assert done.returncode == 2 and "--system" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:", "dns:///gateway"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    done = outrider("generate", "hello", "--address", address)
    assert done.returncode == 2 and f"expected HOST:PORT, found '{address}'" in done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--target", "localhost"], "--target: expected HOST:PORT, found 'localhost'"),
        (
            ["--target", "localhost:1", "--kv-cache", "-1"],
            "--kv-cache: expected a size such as 512MiB, or a fraction above 0",
        ),
        (["--target", "localhost:1", "--kv-cache", "much"], "--kv-cache: expected a size such as"),
    ],
)
def test_a_draft_knows_a_wrong_flag_before_it_waits_for_its_target(flags: list[str], named: str, tmp_path) -> None:
    done = outrider("draft", "--model", str(tmp_path), *flags)
    assert done.returncode == 1 and done.stderr.startswith(f"outrider draft: {named}")


@pytest.mark.parametrize("command", ["up", "bench", "check"])
def test_flags_for_a_service_that_cannot_be_taken_apart_are_named(command: str, tmp_path) -> None:
    draft = [str(tmp_path)] if command == "check" else []
    done = outrider(command, *draft, "--target", str(tmp_path), "--target-flags", "--name 'open")
    assert done.returncode == 2
    assert "--target-flags: No closing quotation" in done.stderr


@pytest.mark.parametrize(
    ("command", "flag"), [("target", "--kv-cache"), ("draft", "--target"), ("gateway", "--pair"), ("check", "--target")]
)
def test_a_command_that_is_handed_over_has_its_own_flags(command: str, flag: str) -> None:
    done = outrider(command, "--help")
    assert done.returncode == 0 and f"Usage: outrider {command} " in done.stdout and flag in done.stdout
    refused = outrider(command, "--no-such-flag")
    assert refused.returncode == 2 and "--no-such-flag" in refused.stderr


@pytest.mark.parametrize(
    "flag", ["--top-k", "--max-new-tokens", "--min-new-tokens", "--stop-token-id", "--draft-tokens"]
)
def test_a_number_that_fits_no_field_of_the_contract_is_an_error_of_the_flag(flag: str) -> None:
    done = outrider("generate", flag, str(2**32), "hello")
    assert done.returncode == 2
    assert flag in done.stderr and "Traceback" not in done.stderr


def test_the_command_line_imports_no_service_and_no_torch() -> None:
    names = "('torch', 'numpy', 'target_service', 'draft_service', 'gateway', 'kernels')"
    check = f"import sys, outrider.cli; sys.exit(', '.join(set({names}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
