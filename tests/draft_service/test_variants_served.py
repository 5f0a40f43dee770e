"""Kinds of drafts and flags that change what is proposed, through a draft process beside a stub target."""

import asyncio

import pytest

from tests.draft_service.client import DraftClient, extend_draft, open_draft
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, FLAGS, Background, StubTarget, shared_tensors
from tests.drafts import write_tiny_draft
from tests.processes import Service

NO_AUX = {"use_aux_hidden_state": False}


@pytest.mark.parametrize(
    ("draft", "flags", "boundaries"),
    [
        ({"eagle_config": NO_AUX, "num_hidden_layers": 2}, ("--draft-window", "6"), [5]),
        ({"layout": "B", "qk_norm": True}, ("--draft-window", "6"), [1, 2, 3]),
        ({"layout": "B", "embed": True}, ("--aux-boundaries", "4,0,2"), [0, 2, 4]),
    ],
    ids=["no aux, deep", "speculators", "override"],
)
def test_proposals_are_those_of_the_model(tmp_path, draft, flags, boundaries):
    directory = write_tiny_draft(tmp_path, **draft)
    embed, head = shared_tensors(write_tiny_draft(tmp_path / "complete"))
    shared = {} if draft.get("embed") else {EMBED: embed}
    window = int(flags[1]) if flags[0] == "--draft-window" else None
    expected = load_proposer(directory, shared, window=window)
    rows = random_rows(40, expected.model.draft.input_width)
    chain = extend(expected, new_sequence(), 0, *rows, 5)
    with (
        Background(lambda: StubTarget(embed, head)) as stub,
        Service("draft_service", "--model", directory, "--target", stub.frame.address, *FLAGS, *flags) as service,
    ):
        assert asyncio.run(propose(service, *rows)) == (boundaries, chain.token_ids)
        assert service.stop() == 0
    if window:  # which rows are in reach changes what is proposed
        assert extend(load_proposer(directory, shared), new_sequence(), 0, *rows, 5) != chain


async def propose(service, states, tokens):
    """The draft's boundaries, and its chain of five after the rows, which come in two pieces."""
    client = DraftClient(service.address)
    info = await client.info()
    await client.send(open_draft(1))
    await client.send(extend_draft(1, 0, states[:30], tokens[:30], 0))
    proposal = await client.propose(extend_draft(1, 30, states[30:], tokens[30:], 5))
    await client.close()
    return list(info.aux_boundaries), list(proposal.token_ids)
