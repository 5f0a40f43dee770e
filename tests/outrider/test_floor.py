"""Bytes of a step against figures that were worked out apart, for gpt-oss-120b at a context of 10,342 tokens."""

import pytest

from outrider.cli.floor import draft_round, draft_step, expert_bytes, target_step
from outrider.synthetic_models import synthetic_model

OSS = synthetic_model("gpt-oss-120b")
CONTEXT = 10_342


def test_the_parts_of_a_plain_step():
    step = target_step(OSS.target, 1, CONTEXT)
    parts = (step.dense, step.head, step.experts, step.keys)
    assert [round(part / 1e5) / 10 for part in parts] == [1938.6, 1158.3, pytest.approx(1906, abs=1), 386.0]
    assert expert_bytes(OSS.target) == pytest.approx(13.24e6, abs=0.005e6)
    assert [round(target_step(OSS.target, 1, context).keys / 1e6) for context in (9592, 11_092)] == [358, 414]


@pytest.mark.parametrize(
    ("rows", "distinct", "step"),
    [
        (1, 4.00, 5.39),
        (2, 7.88, 7.24),
        (3, 11.63, 9.02),
        (4, 15.27, 10.76),
        (5, 18.79, 12.44),
        (6, 22.20, 14.06),
        (8, 28.71, 17.16),
    ],
)
def test_more_rows_read_more_experts_and_nothing_else(rows, distinct, step):
    found = target_step(OSS.target, rows, CONTEXT)
    assert found.experts / 36 / expert_bytes(OSS.target) == pytest.approx(distinct, abs=0.006)
    assert found.total / 1e9 == pytest.approx(step, abs=0.006)
    assert found.total - found.experts == pytest.approx(target_step(OSS.target, 1, CONTEXT).total - 1.906e9, rel=1e-3)


def test_streams_share_weights_and_have_keys_of_their_own():
    one, eight = (target_step(OSS.target, 1, 1024, streams) for streams in (1, 8))
    assert (eight.dense, eight.head, eight.keys) == (one.dense, one.head, 8 * one.keys)
    assert eight.experts == target_step(OSS.target, 8, 1024).experts


def test_a_draft():
    step = draft_step(OSS.draft, CONTEXT)
    assert step.total == pytest.approx(587e6, abs=0.5e6)
    assert step.head == pytest.approx(184.3e6, abs=0.1e6) and step.keys == pytest.approx(21.2e6, abs=0.1e6)
    assert draft_round(OSS.draft, 3, CONTEXT) - 3 * step.total == pytest.approx(49.8e6, abs=0.1e6)
    assert draft_round(OSS.draft, 0, CONTEXT) == 0
