"""Steps of chains through static tensors, as they are captured on CUDA: the tokens and states of ordinary steps."""

import gc
import math
import weakref

import pytest
import torch

from kernels.graphs import Graphs
from kernels.sampling import SamplingParams
from target_service.chain_steps import ChainSteps
from target_service.commands import Advance, Close
from target_service.models import load_model
from tests.models import write_tiny_gpt_oss, write_tiny_llama
from tests.target_service.builders import make_open
from tests.target_service.driving import Request, make_engine, run, with_mistakes

SAMPLED = SamplingParams(temperature=0.8, seed=5, min_p=0.02)
FILTERED = SamplingParams(temperature=1.1, seed=2**64 - 9, top_k=40, top_p=0.9)


class Ignorant:
    """A session that takes events, and keeps none."""

    def take(self, events, stats):
        pass


def requests():
    """Six that come and go at different times: the batch grows and shrinks."""
    choices = [SamplingParams(temperature=0), SAMPLED, FILTERED]
    return [
        Request(list(range(3 + i, 12 + 5 * i)), choices[i % 3], max_new=9 + 4 * (i % 4), comes=i * 2 % 7)
        for i in range(6)
    ]


def asked_of(graphs):
    """The shapes that steps will have asked for."""
    shapes, step = [], graphs.step
    graphs.step = lambda shape, *rest: shapes.append(shape) or step(shape, *rest)
    return shapes


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_gpt_oss])
def test_tokens_and_states_are_those_of_ordinary_steps(tmp_path, write):
    model = load_model(write(tmp_path, tokenizer=False), "cpu", "auto")
    expected = run(make_engine(model), requests())
    graphs = Graphs(torch.device("cpu"))
    shapes = asked_of(graphs)
    propose = with_mistakes(expected, (0, 1, 3, 7), model.config.vocab_size)
    found = run(make_engine(model, graphs), requests(), propose)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert torch.equal(ours.hidden, theirs.hidden)
    rows = {shape.rows for shape in shapes}
    assert rows & set(range(1, 9)) and max(rows) > 8
    assert len({shape.passes for shape in shapes}) > 1


def test_rows_that_are_each_a_chain_have_a_graph_of_their_own(tmp_path):
    model = load_model(write_tiny_llama(tmp_path, tokenizer=False), "cpu", "auto")
    graphs = Graphs(torch.device("cpu"))
    shapes = asked_of(graphs)
    many = [Request([3 + i, 4], SamplingParams(temperature=0), max_new=4) for i in range(15)]
    expected = [outcome.tokens for outcome in run(make_engine(model, sequences=15), many)]
    engine = make_engine(model, graphs, sequences=15)
    assert [outcome.tokens for outcome in run(engine, many)] == expected
    assert {shape.alone for shape in shapes if shape.rows > 8} == {True}
    chained = run(engine, many, lambda request, length: expected[request][length : length + 2])
    assert [outcome.tokens for outcome in chained] == expected
    assert {shape.alone for shape in shapes if shape.rows > 8} == {True, False}


def test_a_step_is_begun_while_its_chains_are_on_their_way(tmp_path, monkeypatch):
    model = load_model(write_tiny_llama(tmp_path, tokenizer=False), "cpu", "auto")
    wanted = [Request([3, 4, 5], SamplingParams(temperature=0), max_new=80)]  # over the end of a page
    expected = run(make_engine(model), wanted)
    begun, ran, begin, go_on = [], [], ChainSteps.begin, ChainSteps.run
    monkeypatch.setattr(ChainSteps, "begin", lambda steps, work: begun.append(0) or begin(steps, work))
    monkeypatch.setattr(ChainSteps, "run", lambda steps, work: ran.append(0) or go_on(steps, work))
    propose = with_mistakes(expected, (3,), model.config.vocab_size)
    found = run(make_engine(model, Graphs(torch.device("cpu"))), wanted, propose)
    assert found[0].tokens == expected[0].tokens
    assert len(ran) > 20
    assert len(ran) <= len(begun) <= len(ran) + 2, "a step that was begun is not begun again"


def test_a_step_that_is_begun_keeps_no_sequence_alive(tmp_path):
    """Behind one stand its session and what that has not sent."""
    model = load_model(write_tiny_llama(tmp_path, tokenizer=False), "cpu", "auto")
    engine, session = make_engine(model, Graphs(torch.device("cpu"))), Ignorant()
    engine.apply([make_open(1, 4, session=session)])
    engine.step()
    engine.apply([Advance(session, 1, [], None, 0.0)])
    engine.step()
    sequence = weakref.ref(engine.scheduler.active[0])
    engine.apply([Close(session, 1)])
    gc.collect()
    assert engine._computation._chain_steps._begun is not None
    assert sequence() is None


@pytest.mark.parametrize("part", ["kernels.graphs.Graphs.step", "target_service.batch.to_device"])
def test_a_step_that_cannot_be_begun_costs_nobody_anything(tmp_path, monkeypatch, part):
    """Its chains find no step begun, and its pages are still to be written."""
    model = load_model(write_tiny_llama(tmp_path, tokenizer=False), "cpu", "auto")
    wanted = [Request([3 + i, 4, 5], SAMPLED, max_new=80) for i in range(2)]  # over the end of a page
    expected = run(make_engine(model), wanted)
    engine, failures = make_engine(model, Graphs(torch.device("cpu"))), []
    begin, step = engine._computation.begin, engine.step

    def begin_without(work):
        with monkeypatch.context() as patch:
            patch.setattr(part, lambda *_: 1 / 0)
            begin(work)

    def step_as_the_thread_does():
        try:
            step()
        except ZeroDivisionError as error:
            failures.append(error)
            engine.on_failure(error)

    monkeypatch.setattr(engine._computation, "begin", begin_without)
    monkeypatch.setattr(engine, "step", step_as_the_thread_does)
    found = run(engine, wanted, with_mistakes(expected, (3,), model.config.vocab_size))
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in expected]
    assert failures


def test_logits_that_change_before_a_row_chooses(tmp_path):
    """Steps with penalties, a bias or a mask end with the logits."""
    model = load_model(write_tiny_llama(tmp_path, tokenizer=False), "cpu", "auto")
    wanted = [
        Request([5, 6, 7], SamplingParams(temperature=0, repetition_penalty=1.4), max_new=6),
        Request([8, 9], SAMPLED, max_new=20, top_logprobs=2),
        Request([11, 4], SamplingParams(seed=4, logit_bias={7: 3.0, 9: -math.inf}), max_new=9, comes=3),
        Request([3, 4], FILTERED, max_new=30),
    ]
    expected = run(make_engine(model), wanted)
    graphs = Graphs(torch.device("cpu"))
    found = run(make_engine(model, graphs), wanted, with_mistakes(expected, (3,), model.config.vocab_size))
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in expected]
    assert [outcome.logprobs for outcome in found] == [outcome.logprobs for outcome in expected]
    assert len(found[1].logprobs) == 20
    assert {shape.passes for shape in graphs._steps} == {None, (False, True)}


def test_warming_up_leaves_no_trace(tmp_path):
    model = load_model(write_tiny_gpt_oss(tmp_path, tokenizer=False), "cpu", "auto")
    engine = make_engine(model)
    engine.warm_up()
    assert run(engine, requests()[:2])[1].tokens == run(make_engine(model), requests()[:2])[1].tokens


def test_shapes_beyond_those_that_are_held_work(tmp_path):
    model = load_model(write_tiny_llama(tmp_path, tokenizer=False), "cpu", "auto")
    expected = run(make_engine(model), requests())
    graphs = Graphs(torch.device("cpu"), most=2)
    found = run(make_engine(model, graphs), requests(), with_mistakes(expected, (0, 2, 5), model.config.vocab_size))
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in expected]
    assert len(graphs._steps) == 2
