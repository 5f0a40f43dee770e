"""lm_eval's way to a gateway, with as much of lm_eval as it takes."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.scripted.cluster import PATIENT, Cluster, scripted_cluster

SCRIPT = Path(__file__).parents[2] / "deploy" / "lm_eval" / "run.py"


@pytest.fixture
def model_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that the script registers."""
    registered: dict[str, Any] = {}
    contents = {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": lambda: None},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: registered.setdefault(name, cls)},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    runpy.run_path(str(SCRIPT))
    return registered["outrider"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with scripted_cluster([[]], [[]], PATIENT) as running:
        yield running


def test_requests_are_answered_in_order(model_class: Any, cluster: Cluster) -> None:
    model = model_class(address=cluster.gateway.address, concurrency="2", max_new_tokens="12")
    texts = ["one", "two words", "three"]
    plain = model.generate_until([SimpleNamespace(args=(text, {"until": []})) for text in texts])
    assert len(set(plain)) == 3
    again = [model.generate_until([SimpleNamespace(args=(text, {}))])[0] for text in texts]
    assert again == plain
    history = [{"role": "user", "content": text} for text in texts[:1]]
    conversation = SimpleNamespace(args=(model.apply_chat_template(history), {"until": []}))
    assert model.generate_until([conversation]) != plain[:1]
    request = model._request(json.dumps(history))
    assert (request.conversation.messages[0].content, request.sampling.temperature) == ("one", 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("analysisSo 2. Question: why?assistantfinalThe answer is 4. Question: 5", "The answer is 4. "),
        ("finalIt is 4", "It is 4"),
        ("analysiscut off", "analysiscut off"),
    ],
)
def test_the_last_channel_is_the_answer(model_class: Any, text: str, answer: str) -> None:
    model = model_class()
    model.apply_chat_template([])
    assert model._cut(text, ["Question:"]) == answer


def test_what_it_cannot_score_is_refused(model_class: Any) -> None:
    with pytest.raises(NotImplementedError, match="log-probabilities"):
        model_class().loglikelihood([])
