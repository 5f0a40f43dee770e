"""The draft's test of itself at its start: one that is near chance is reported and never used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.channels import connect, is_serving
from tests.drafts import point, write_tiny_draft
from tests.end_to_end.services import same, start_target
from tests.end_to_end.trio import start_draft
from tests.gateway.client import Client
from tests.models import write_tiny_gpt_oss
from tests.processes import Service
from tests.scripted.cluster import eventually, start_gateway
from tests.trained import passages_of, write_trained_draft

BOUNDARIES = (2, 4, 6)
IDS = "eagle_aux_hidden_state_layer_ids"
CASE = {"prompt": "the hat of the", "max_new_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gpt_oss(tmp_path_factory.mktemp("target"), num_hidden_layers=6, harmony=True)


@pytest.fixture(scope="module")
def target(model: Path):
    with start_target(model) as started:
        yield started


async def serving(draft: Service) -> list[bool]:
    """What health says of the process and of its service."""
    async with connect(draft.address) as channel:
        return [await is_serving(channel, name, timeout=60) for name in ("", "outrider.v1.DraftService")]


async def test_a_draft_that_fits_serves(model: Path, target: Service, tmp_path: Path) -> None:
    """Its config says it all wrong, the flags say it as it is."""
    passages = await passages_of(target.address, BOUNDARIES, 32)
    draft_model = write_trained_draft(tmp_path / "trained", model, passages, BOUNDARIES)
    other = write_tiny_draft(tmp_path / "other", draft_vocab_size=320)
    point(tmp_path / "current", draft_model)
    config = json.loads((draft_model / "config.json").read_text())
    config |= {"norm_output": True, "norm_before_residual": True, "eagle_config": {IDS: [0, 1, 2]}}
    (draft_model / "config.json").write_text(json.dumps(config))
    flags = ("--aux-boundaries", "2,4,6", "--norm-output", "false", "--norm-before-residual", "false", "--self-test")
    with start_draft(tmp_path / "current", target.address, *flags) as draft:
        assert "residual: g; fed back: o;" in draft.text
        assert await serving(draft) == [True, True]
        assert draft.metric("outrider_draft_misfit") == 0
        assert draft.metric("outrider_draft_self_test_rows") > 100
        assert draft.metric("outrider_draft_self_test_agreement") > 0.8
        assert re.search(r"INFO .* self-test: the first token is right at (9\d|100)\.\d%", draft.text), draft.text
        assert target.metric("outrider_num_requests_running") == target.metric("outrider_kv_cache_usage_perc") == 0
        # It is not replaced by one that does not.
        point(tmp_path / "current", other)
        draft.hang_up()
        eventually(lambda: draft.metric("outrider_last_reload_successful") == 0, dump=[draft])
        refused = re.compile(r"ERROR .* SIGHUP: .*: near chance, .*; the old weights go on serving")
        eventually(lambda: refused.search(draft.text) is not None, dump=[draft])  # said right after the metric is set
        assert await serving(draft) == [True, True]
        assert draft.metric("outrider_draft_misfit", draft_model="trained") == 0


async def test_a_draft_that_is_near_chance_is_never_used(target: Service, tmp_path: Path) -> None:
    draft_model = write_tiny_draft(tmp_path, draft_vocab_size=320)
    with (
        start_draft(draft_model, target.address, "--self-test") as draft,
        start_gateway([f"{target.address}={draft.address}"], all_there=False) as gateway,
    ):
        assert await serving(draft) == [False, False]
        assert draft.metric("outrider_draft_misfit") == 1 and draft.metric("outrider_draft_attached") == 1
        assert re.search(r"ERROR .* self-test: .*: near chance, this draft does not fit", draft.text), draft.text
        eventually(lambda: gateway.metric("outrider_peer_available", kind="target") == 1)
        async with Client(gateway.address) as client:
            plain = await client.generate(k=0, **CASE)
            answer = await client.generate(k=3, **CASE)
        assert same(answer, plain) and answer.usage.draft_tokens == 0
        assert gateway.metric("outrider_peer_available", kind="draft") == 0
    with start_draft(draft_model, target.address, "--no-self-test") as draft:
        assert await serving(draft) == [True, True]
