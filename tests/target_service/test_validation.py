"""Every bad field is named; what is good arrives as it was sent."""

import math

import pytest

from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2, target_pb2
from target_service.commands import Advance, AuxRequest, Close, Open, Reject
from target_service.limits import Limits
from target_service.validation import MAX_TOP_LOGPROBS, CommandReader

LIMITS = Limits(
    vocab_size=2000,
    num_layers=3,
    max_sequence_length=50,
    max_draft_tokens=4,
    max_sequences=5,
    max_queue=9,
    step_tokens=8,
)
SESSION = object()


def read(**command):
    return CommandReader(LIMITS, [1, 2]).read(SESSION, target_pb2.TargetCommand(sequence_id=7, **command))


def open_fields(**fields):
    return {"token_ids": [3, 4, 5], **fields}


BAD_OPENS = [
    ("open.token_ids", {"token_ids": []}, "at least one token"),
    ("open.token_ids[1]", {"token_ids": [0, 2000]}, "below vocab_size 2000, found 2000"),
    ("open.token_ids", {"token_ids": [0] * 50}, "max_sequence_length 50, found 50"),
    ("open.num_generated", {"num_generated": 3}, "fewer than the 3 token_ids, found 3"),
    ("open.num_generated", {"num_generated": 2, "max_new_tokens": 2}, "fewer than max_new_tokens 2, found 2"),
    ("open.min_new_tokens", {"min_new_tokens": 5, "max_new_tokens": 4}, "at most max_new_tokens 4, found 5"),
    ("open.stop_token_ids[0]", {"stop_token_ids": [9999]}, "found 9999"),
    ("open.prompt_logprobs", {"prompt_logprobs": {"top": 1}, "num_generated": 1}, "none when reopening"),
    ("open.logprobs.top", {"logprobs": {"top": MAX_TOP_LOGPROBS + 1}}, "at most"),
    ("open.prompt_logprobs.top", {"prompt_logprobs": {"top": MAX_TOP_LOGPROBS + 1}}, "at most"),
    ("open.aux.boundaries", {"aux": {"boundaries": [1, 5]}}, "0 to 4, found 5"),
    ("open.aux.boundaries", {"aux": {"boundaries": [1, 1]}}, "each once"),
    ("open.sampling.temperature", {"sampling": {"temperature": -0.5}}, "found -0.5"),
    ("open.sampling.temperature", {"sampling": {"temperature": math.nan}}, "found nan"),
    ("open.sampling.temperature", {"sampling": {"temperature": math.inf}}, "found inf"),
    ("open.sampling.top_k", {"sampling": {"top_k": 0}}, "at least 1, found 0"),
    ("open.sampling.top_p", {"sampling": {"top_p": 0}}, "above 0 and at most 1"),
    ("open.sampling.top_p", {"sampling": {"top_p": 1.5}}, "found 1.5"),
    ("open.sampling.top_p", {"sampling": {"top_p": math.nan}}, "found nan"),
    ("open.sampling.min_p", {"sampling": {"min_p": -0.25}}, "found -0.25"),
    ("open.sampling.repetition_penalty", {"sampling": {"repetition_penalty": 0}}, "above 0"),
    ("open.sampling.presence_penalty", {"sampling": {"presence_penalty": math.inf}}, "finite"),
    ("open.sampling.frequency_penalty", {"sampling": {"frequency_penalty": math.nan}}, "finite"),
    ("open.sampling.logit_bias[2000]", {"sampling": {"logit_bias": {2000: 1.0}}}, "below vocab_size 2000"),
    ("open.sampling.logit_bias[3]", {"sampling": {"logit_bias": {3: math.nan}}}, "found nan"),
    ("open.sampling.logit_bias[3]", {"sampling": {"logit_bias": {3: math.inf}}}, "found inf"),
]


@pytest.mark.parametrize(("field", "change", "words"), BAD_OPENS)
def test_a_bad_open_is_rejected_by_the_name_of_its_field(field, change, words):
    command = read(open=open_fields(**change))
    assert isinstance(command, Reject) and command.sequence_id == 7
    assert isinstance(command.error, InvalidArgument)
    assert command.error.field == field
    assert words in command.error.message


@pytest.mark.parametrize(
    ("field", "command", "words"),
    [
        ("advance.draft_token_ids", {"advance": {"draft_token_ids": [0] * 5}}, "at most max_draft_tokens 4"),
        ("advance.draft_token_ids[2]", {"advance": {"draft_token_ids": [0, 1, 2000]}}, "found 2000"),
        ("advance.aux.boundaries", {"advance": {"aux": {"boundaries": [9]}}}, "0 to 4, found 9"),
        ("command", {}, "expected open, advance, grant or close"),
    ],
)
def test_other_bad_commands_are_rejected_by_the_name_of_their_field(field, command, words):
    found = read(**command)
    assert isinstance(found, Reject)
    assert found.error.field == field and words in found.error.message


def test_an_open_arrives_as_it_was_sent():
    command = read(
        open=open_fields(
            num_generated=1,
            max_new_tokens=9,
            min_new_tokens=2,
            stop_token_ids=[8],
            sampling={"temperature": 0.5, "top_k": 3, "seed": 11, "logit_bias": {4: -math.inf}},
            logprobs={"top": 2},
            aux={"boundaries": [3, 0], "first_position": 5, "draft_instance_id": "d"},
            arrival_unix_us=123,
            request_id="r",
        )
    )
    assert isinstance(command, Open)
    assert command.token_ids.tolist() == [3, 4, 5]
    assert command.ending.ending_token_ids == {1, 2, 8}
    assert (command.num_generated, command.ending.max_new_tokens, command.ending.min_new_tokens) == (1, 9, 2)
    assert command.sampling.logit_bias == {4: -math.inf}
    assert (command.sampling.temperature, command.sampling.top_k, command.sampling.seed) == (0.5, 3, 11)
    assert (command.top_logprobs, command.top_prompt_logprobs) == (2, None)
    assert command.aux == AuxRequest((0, 3), common_pb2.TRANSPORT_INLINE, "d", 5)
    assert (command.arrival_unix_us, command.request_id) == (123, "r")


def test_absent_fields_leave_their_part_out():
    command = read(open=open_fields(ignore_eos=True))
    assert command.sampling.temperature == 1 and not command.sampling.has_penalties
    assert command.ending.ending_token_ids == frozenset()
    assert command.arrival_unix_us > 10**15  # the time of arrival here
    assert command.aux == AuxRequest()


def test_an_advance_and_a_close_arrive_as_they_were_sent():
    advance = read(advance={"draft_token_ids": [5, 1999]})
    assert isinstance(advance, Advance)
    assert advance.draft_token_ids == [5, 1999] and advance.aux is None
    assert read(advance={"aux": {}}).aux == AuxRequest()
    assert read(close={}) == Close(SESSION, 7)
