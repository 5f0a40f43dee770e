"""`make demo` itself, on tiny models: the same processes, flags and checks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from outrider.cli.client import Generation
from outrider.cli.processes import PairOptions
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


def test_the_demo_answers_twice_and_compares(tmp_path: Path) -> None:
    target, draft = write_tiny_llama(tmp_path / "target"), write_tiny_draft(tmp_path / "draft")
    flags = ["--target", target, "--draft", draft, "--max-new-tokens", "24", "--draft-tokens", "3"]
    done = subprocess.run(
        [sys.executable, str(DEMO / "demo.py"), "hello", *flags],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(DEMO.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"same tokens: yes, all \d+\n", done.stdout)
    assert re.search(r"speed: \d+\.\d tok/s without speculation, \d+\.\d with it", done.stdout)
    assert re.search(r"acceptance length \d\.\d\d over \d+ rounds\naccepted by position: 1: \d+%", done.stdout)


def test_different_answers_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(DEMO))
    import demo

    async def serve(options: PairOptions, *question: object) -> demo.Answers:
        return demo.Answers(Generation(sent=0.0, token_ids=[5, 6]), Generation(sent=0.0, token_ids=[5, 7]))

    monkeypatch.setattr(demo, "serve_and_compare", serve)
    with pytest.raises(typer.Exit) as exit_:
        demo.main("hello", target=DEMO)
    assert exit_.value.exit_code == 1
    output = capsys.readouterr()
    assert "same tokens: NO" in output.out and "expected the same tokens" in output.err


def test_acceptance_asks_greedily_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO))
    import acceptance

    request = acceptance.question_request("Why?", 0, 9)
    assert (request.sampling.temperature, request.max_new_tokens) == (0, 9)
    assert request.sampling.HasField("temperature") and request.speculation.HasField("max_draft_tokens")
    assert [(message.role, message.content) for message in request.conversation.messages] == [("user", "Why?")]
    answer = Generation(sent=0.0, token_ids=list(range(8)), arrivals=[(1.0, 1), (2.0, 3), (3.0, 4)])
    answer.usage.acceptance_histogram.extend([1, 0, 1])
    answer.usage.drafted_per_position.extend([2, 2])
    answer.usage.accepted_tokens = 2
    lines = acceptance.report([answer])
    assert lines[0] == "1 questions, 8 tokens, 3.5 tok/s after the first"
    assert lines[1] == "mean acceptance length 2.000 over 2 rounds"
    assert "1: 50%  2: 50%" in lines[2] and "[1, 0, 1]" in lines[3]


def test_questions_are_many_and_distinct() -> None:
    questions = (DEMO / "questions.txt").read_text().splitlines()
    assert len(questions) >= 50 and len(set(questions)) == len(questions) and all(map(str.strip, questions))
