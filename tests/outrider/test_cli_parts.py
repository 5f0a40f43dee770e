"""The parts of the command line that need no service."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.client import Generation
from outrider.cli.generate import mark_drafts
from outrider.cli.load import questions, random_prompts
from outrider.cli.options import GenerationOptions
from outrider.cli.processes import ServiceFailed
from outrider.cli.statistics import Acceptance, describe, percentile, steady_speed
from outrider.v1 import gateway_pb2


def piece(parts: list[tuple[str, bool]], rest: str = "") -> gateway_pb2.GenerateResponse:
    """A message whose tokens made `parts` certain, and `rest` at the end."""
    ends, size = [], 0
    for text, _ in parts:
        size += len(text.encode())
        ends.append(size)
    return gateway_pb2.GenerateResponse(
        text="".join(text for text, _ in parts) + rest,
        token_ids=range(len(parts)),
        from_draft=[drafted for _, drafted in parts],
        text_ends=ends,
    )


def test_drafted_text_is_marked_by_token_and_characters_stay_whole() -> None:
    marked = mark_drafts(piece([("Zürich", True), ("", True), (" is", True), (" 🦉", False)], "."), colour=False)
    assert marked == "[Zürich][ is] 🦉."


def test_drafted_text_is_green_in_a_terminal() -> None:
    assert mark_drafts(piece([(" a", True), (" b", False)]), colour=True) == "\x1b[32m a\x1b[0m b"


PLAIN_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="[]"), max_size=4)


@given(st.lists(st.tuples(PLAIN_TEXT, st.booleans()), max_size=8))
def test_marking_adds_brackets_and_nothing_else(parts: list[tuple[str, bool]]) -> None:
    message = piece(parts)
    marked = mark_drafts(message, colour=False)
    assert marked.replace("[", "").replace("]", "") == message.text
    assert marked.count("[") == sum(drafted and bool(text) for text, drafted in parts)


def generation(histogram: list[int], drafted: list[int], steps: int) -> Generation:
    usage = gateway_pb2.GenerateResponse.Usage(
        verify_steps=steps,
        draft_tokens=sum(drafted),
        accepted_tokens=sum(count * rounds for count, rounds in enumerate(histogram)),
        acceptance_histogram=histogram,
        drafted_per_position=drafted,
    )
    return Generation(sent=0.0, usage=usage, arrivals=[(1.0, 1), (3.0, 4)], finished=3.0)


def test_acceptance_adds_requests_of_different_chains() -> None:
    total = Acceptance.of([generation([1, 2, 1], [4, 3], steps=5), generation([0, 2], [2], steps=2)])
    assert (total.rounds, total.verify_steps, total.drafted, total.accepted) == (6, 7, 9, 6)
    assert total.length == 2.0
    assert total.by_position == [5 / 6, 1 / 3]


def test_acceptance_without_a_round_is_one_token_a_step() -> None:
    total = Acceptance.of([generation([], [], steps=9)])
    assert (total.rounds, total.length, total.by_position) == (0, 1.0, [])


def test_statistics_say_speed_acceptance_and_positions() -> None:
    first, second, third = describe(generation([1, 2, 1], [4, 3], steps=4))
    assert "first after 1000 ms, 2.0 tok/s after it" in first
    assert second == "acceptance length 2.00 over 4 rounds; accepted 4 of 7 draft tokens (57%)"
    assert third == "accepted by position: 1: 75%  2: 33%"


def test_the_steady_speed_is_that_of_all_streams_together() -> None:
    early = Generation(sent=0.0, arrivals=[(1.0, 1), (2.0, 3), (4.0, 3), (6.0, 3)])
    late = Generation(sent=0.0, arrivals=[(3.0, 1), (5.0, 4), (7.0, 4)])
    assert steady_speed([early, late]) == (3 + 3 + 4) / (6 - 3)
    assert steady_speed([early, Generation(sent=0.0, arrivals=[(6.0, 1), (9.0, 5)])]) == 0.0
    assert steady_speed([early, Generation(sent=0.0)]) == steady_speed([]) == 0.0


def test_percentiles_are_values_that_occurred() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]
    assert percentile([], 0.5) == 0.0


def test_a_request_says_only_what_was_asked_for() -> None:
    request = GenerationOptions().request()
    assert request == gateway_pb2.GenerateRequest(sampling={})
    assert not request.HasField("speculation")


def test_options_become_fields() -> None:
    request = GenerationOptions(
        seed=-1, temperature=0.0, logit_bias=["3=-1.5", "7=2"], draft_tokens=0, stop=["\n"], stop_token_id=[2]
    ).request()
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.HasField("temperature")
    assert dict(request.sampling.logit_bias) == {3: -1.5, 7: 2.0}
    assert request.speculation.HasField("max_draft_tokens")
    assert (list(request.stop), list(request.stop_token_ids)) == (["\n"], [2])


@pytest.mark.parametrize("bias", ["3", "x=1", "3=y", "-1=2", "4294967296=1"])
def test_a_malformed_bias_is_a_usage_error_that_names_it(bias: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"--logit-bias: .*{bias}"):
        GenerationOptions(logit_bias=[bias]).request()


def test_random_prompts_depend_on_the_seed_alone() -> None:
    prompts = random_prompts(3, 5, 100, seed=1)
    assert prompts == random_prompts(3, 5, 100, seed=1) != random_prompts(3, 5, 100, seed=2)
    assert all(len(prompt.token_ids.token_ids) == 5 for prompt in prompts)


def test_a_file_without_questions_is_an_error(tmp_path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text("\n \n")
    with pytest.raises(ValueError, match=r"questions\.txt: expected one prompt a line"):
        questions(file)
    file.write_text("one\n\n two \n")
    assert [prompt.conversation.messages[0].content for prompt in questions(file)] == ["one", "two"]


@pytest.mark.parametrize(("returncode", "exit_code"), [(3, 3), (0, 1), (-9, 137)])
def test_a_service_that_ended_gives_the_commands_exit_code(returncode: int, exit_code: int) -> None:
    assert ServiceFailed("target", returncode).exit_code == exit_code
